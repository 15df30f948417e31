"""One training run: its state, the step that moves it, and the one file it is resumed from."""

from __future__ import annotations

import json
import math
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from probelens.errors import InputError, StoreError
from probelens.models.build import config_of
from probelens.models.checkpoint import save
from probelens.models.evaluation import derive_seed, logits_of, predict
from probelens.results.result import Result

if TYPE_CHECKING:
    from probelens.models.train_config import TrainConfig
    from probelens.tasks.base import Task
    from probelens.tasks.data import Batch

STATE_FILE = "train.safetensors"
MODEL_FILE = "model.safetensors"
# These change how a run is carried out, not what comes out of it.
NOT_IDENTITY = ("checkpoint_every", "threads")
_PROGRESS = ("step", "decay_from", "reached", "done", "length", "sums", "seconds", "cpu_seconds")


@dataclass(frozen=True)
class TrainState(Result):
    """The state from which a run continues."""

    identity: dict[str, Any]
    progress: dict[str, Any]
    history: list[dict[str, Any]]
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]


class Run:
    """One training run. Its next step follows from what `save` writes, and from nothing else."""

    def __init__(
        self, module: nn.Module, task: Task, config: TrainConfig, slices: dict[str, slice], folder: Path | None
    ) -> None:
        self.module, self.task, self.config, self.slices, self.folder = module, task, config, slices, folder
        self.device = next(module.parameters()).device
        trained = [p for p in module.parameters() if p.requires_grad]
        decay = config.weight_decay
        self.optimizer = torch.optim.AdamW(trained, lr=config.lr, betas=config.betas, weight_decay=decay)
        self.step = 0
        self.decay_from = config.steps - config.decay_steps
        self.reached = self.done = False
        self.length = config.length if config.start_length is None else config.start_length
        self.sums = [0.0, 0.0, 0.0]  # loss, accuracy and steps since the last row
        self.history: list[dict[str, Any]] = []
        self.seconds = self.cpu_seconds = 0.0
        self._whole = True  # False during an update
        self._held_out: Batch | None = None

    @property
    def identity(self) -> dict[str, Any]:
        """The settings by which two calls are the same run."""
        formal = config_of(self.module)
        shapes = {name: list(p.shape) for name, p in self.module.named_parameters()}
        settings = {k: v for k, v in self.config.to_dict().items() if k not in NOT_IDENTITY}
        model = formal.to_dict() if formal else shapes
        identity = {"model": model, "task": self.task.config, "labels": list(self.slices), "config": settings}
        # As it comes back from the file: tuples are lists there.
        return json.loads(json.dumps(identity, default=repr))

    @property
    def phase(self) -> str:
        """Phase of the learning-rate schedule at the next step."""
        if self.step >= self.decay_from:
            return "decay"
        return "warmup" if self.step < self.config.warmup else "main"

    def open(self, resume: bool) -> None:
        """Start, continue from the folder's checkpoint, or refuse a folder of something else."""
        if self.folder is None:
            return
        path, model_path = self.folder / STATE_FILE, self.folder / MODEL_FILE
        if not path.exists():
            if model_path.exists():
                raise StoreError(
                    f"{str(self.folder)!r} holds a {MODEL_FILE} but no {STATE_FILE}: it is not the folder of "
                    "a training run. Nothing was changed there: choose another folder."
                )
            return
        try:
            state = TrainState.load(path)
        except StoreError as err:
            if not resume:
                return
            raise StoreError(
                f"{err}. Nothing was changed there: delete the file, choose another folder, or start the run "
                "again with resume=False."
            ) from err
        if state.identity != self.identity:
            raise StoreError(
                f"{str(self.folder)!r} holds another run: {_difference(state.identity, self.identity)}. "
                "Nothing was changed there: choose another folder."
            )
        if resume:
            self._restore(state)
        else:
            model_path.unlink(missing_ok=True)

    def _restore(self, state: TrainState) -> None:
        moments: dict[int, dict[str, Tensor]] = {}
        for key, value in state.optimizer.items():
            index, name = key.split(".", 1)
            moments.setdefault(int(index), {})[name] = value
        groups = self.optimizer.state_dict()["param_groups"]
        try:
            self.module.load_state_dict(state.model)
            self.optimizer.load_state_dict({"state": moments, "param_groups": groups})
            for name in _PROGRESS:
                setattr(self, name, state.progress[name])
        except (KeyError, ValueError, RuntimeError) as err:
            raise StoreError(
                f"the checkpoint in {str(self.folder)!r} does not fit this model: {err}. Nothing was changed there."
            ) from err
        self.history = list(state.history)

    def save(self) -> None:
        """Replace the state file, and add the model's own file when the run is done."""
        if self.folder is None:
            return
        moments = self.optimizer.state_dict()["state"]
        TrainState(
            identity=self.identity,
            progress={name: getattr(self, name) for name in _PROGRESS},
            history=self.history,
            model=dict(self.module.state_dict()),
            optimizer={f"{i}.{name}": value for i, state in moments.items() for name, value in state.items()},
        ).save(self.folder / STATE_FILE)
        self.save_model()

    def save_model(self) -> None:
        """Write the trained model for `probelens.models.load`, once there is one."""
        if self.folder is not None and self.done and config_of(self.module) is not None:
            save(self.module, self.folder / MODEL_FILE)

    def loop(self, interrupts: Interrupts, report: Callable[[dict[str, Any]], None]) -> None:
        """Take steps until done or interrupted, with checkpoints in between and at the end."""
        wall, cpu = time.perf_counter(), time.process_time()

        def save() -> None:
            nonlocal wall, cpu
            now, used = time.perf_counter(), time.process_time()
            self.seconds += now - wall
            self.cpu_seconds += used - cpu
            wall, cpu = now, used
            self.save()

        try:
            while not self.done:
                report(self.advance())
                stop = interrupts.pending
                if self.done or stop or self.step % self.config.checkpoint_every == 0:
                    save()
                if stop:
                    return
        except KeyboardInterrupt:
            # A second Ctrl-C, or one raised by the task or by report. During an update the state is
            # incomplete, and the last checkpoint is kept.
            if self._whole and not interrupts.pending:
                save()
            raise

    def advance(self) -> dict[str, Any]:
        """Take one step, evaluate if it is due, and update curriculum and schedule; returns what the step came to."""
        config = self.config
        seed = derive_seed(config.seed, "train", self.step)
        batch = self.task.sample(config.batch_size, length=self.length, seed=seed)
        rate, phase = config.lr * self.schedule(), self.phase
        self.module.train()
        loss, accuracy = self._loss(batch)
        value = float(loss.detach())
        if not math.isfinite(value):
            raise InputError(
                f"the loss is {value} at step {self.step}: training diverged. Use an lr below {config.lr} or "
                f"a clip below {config.clip}. The last checkpoint is untouched."
            )
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.module.parameters(), config.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self._whole = False
        self.optimizer.step()
        self.step += 1
        self.sums = [self.sums[0] + value, self.sums[1] + accuracy, self.sums[2] + 1]
        used = self.length
        if accuracy > config.grow_at:
            self.length = min(config.length, used + config.grow_by)
        last = self.step >= self.decay_from + config.decay_steps
        if last or self.step % config.eval_every == 0:
            last = self._record(used, rate, phase) or last
        self.done = last
        self._whole = True
        about = {"step": self.step, "steps": self.decay_from + config.decay_steps, "length": used, "phase": phase}
        return {**about, "loss": value, "accuracy": accuracy}

    def schedule(self) -> float:
        """The learning rate of the next step as a fraction of the peak."""
        config = self.config
        rise = min(1.0, (self.step + 1) / config.warmup) if config.warmup else 1.0
        fall = 1.0 - max(0, self.step - self.decay_from + 1) / (config.decay_steps + 1)
        return rise * fall

    def _loss(self, batch: Batch) -> tuple[Tensor, float]:
        """Summed cross-entropy of the labels, and the share of positions where all of them are right."""
        logits = logits_of(self.module, batch.tokens.to(self.device))
        mask = batch.mask.to(self.device)
        logits = logits[mask]
        total = logits.new_zeros(())
        right = torch.ones(len(logits), dtype=torch.bool, device=self.device)
        for name, part in self.slices.items():
            truth = batch.labels[name].to(self.device)[mask]
            total = total + F.cross_entropy(logits[:, part], truth)
            right &= logits.detach()[:, part].argmax(-1) == truth
        return total, float(right.double().mean())

    def _record(self, length: int, rate: float, phase: str) -> bool:
        """Write a row of the history; True when the run is over with it."""
        config = self.config
        if self._held_out is None:
            seed = derive_seed(config.seed, "held out", 0)
            self._held_out = self.task.sample(config.eval_sequences, length=config.length, seed=seed)
        held_out = self._held_out
        self.module.eval()
        with torch.no_grad():
            predicted = predict(self.module, held_out.tokens, self.slices, config.batch_size)
        right = torch.stack([predicted[name] == held_out.labels[name] for name in self.slices]).all(0)
        accuracy = float(right[held_out.mask].double().mean())
        loss, hits, count = self.sums
        row = {"step": self.step, "length": length, "lr": rate, "loss": loss / count, "train_accuracy": hits / count}
        self.history.append({**row, "accuracy": accuracy, "phase": phase})
        self.sums = [0.0, 0.0, 0.0]
        if config.target_accuracy is not None and accuracy >= config.target_accuracy:
            self.reached = True
            self.decay_from = min(self.decay_from, self.step)
        return self.step >= self.decay_from + config.decay_steps


class Interrupts:
    """Delay Ctrl-C until the step in progress is complete and saved. A second Ctrl-C is immediate."""

    def __init__(self) -> None:
        self.pending = False
        self._before: Any = None

    def __enter__(self) -> Interrupts:
        # Handlers can be set in the main thread only; elsewhere Ctrl-C doesn't arrive anyway.
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def _note(self, number: int, frame: Any) -> None:
        if self.pending:
            raise KeyboardInterrupt
        self.pending = True

    def __exit__(self, raised: type[BaseException] | None, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
        if self.pending and raised is None:
            raise KeyboardInterrupt


def _difference(theirs: Any, ours: Any, where: str = "") -> str:
    """The differences between two identities as text."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        keys = [key for key in sorted({*theirs, *ours}) if theirs.get(key) != ours.get(key)]
        return "; ".join(_difference(theirs.get(k), ours.get(k), f"{where}.{k}" if where else k) for k in keys)
    return f"{where} is {theirs!r} there and {ours!r} here"
