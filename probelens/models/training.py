"""One training loop for formal models: fresh data every step, killed at any moment, resumed bit for bit.

What step i sees follows from the seed, i and the state before it, so a run that was killed and
resumed ends with the weights of one that was not. The state is one file, replaced atomically.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from probelens.errors import InputError
from probelens.models.build import n_params
from probelens.models.evaluation import Backend, EvalResult, check_vocabulary, evaluate, label_slices, unwrap
from probelens.models.train_config import TrainConfig
from probelens.models.training_run import Interrupts, Run
from probelens.numerics.modes import differentiable
from probelens.results.progress import progress_bar
from probelens.results.result import Result

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

    from probelens.tasks.base import Task

__all__ = ["EvalResult", "TrainConfig", "TrainResult", "evaluate", "train"]


@dataclass(frozen=True)
class TrainResult(Result):
    """Outcome of a training run.

    Args:
        task: Name of the task.
        labels: Labels the model was trained on.
        steps: Steps taken.
        reached: Whether the held-out accuracy met the target; False without a target.
        accuracy: Held-out accuracy at the full length after the last step.
        length: The training length.
        n_params: Trainable parameters.
        seconds: Wall time over all sessions of the run.
        cpu_seconds: CPU time of the process over all sessions.
        config: The TrainConfig's fields.
        history: One row per evaluation: step, length (of the curriculum), lr, loss and train_accuracy
            (means over the steps since the row before), accuracy (held out, full length), phase.
    """

    task: str
    labels: list[str]
    steps: int
    reached: bool
    accuracy: float
    length: int
    n_params: int
    seconds: float
    cpu_seconds: float
    config: dict[str, Any]
    history: list[dict[str, Any]]

    def to_dataframe(self) -> pd.DataFrame:
        """The history, one row per evaluation."""
        import pandas as pd

        return pd.DataFrame([{"task": self.task, **row} for row in self.history])

    def plot(self) -> go.Figure:
        """Loss and accuracy, in training and held out, against the step."""
        from probelens.results.plots import training_curve

        names = {"accuracy in training": "train_accuracy", "accuracy held out": "accuracy"}
        rows = [{**row, **{name: row[key] for name, key in names.items()}} for row in self.history]
        target, title = self.config["target_accuracy"], f"Training on {self.task}"
        return training_curve(rows, y=("loss", *names), target=target, title=title)


def train(
    model: Any,
    task: Task,
    *,
    config: TrainConfig | None = None,
    label: str | Sequence[str] | None = None,
    checkpoint_dir: str | os.PathLike[str] | None = None,
    resume: bool = True,
    progress: bool | Callable[[dict[str, Any]], None] = True,
    backend: Backend = None,
) -> TrainResult:
    """Train a model, in place, to name a label of the task at every position.

    The loss is the cross-entropy of the label at t given the tokens up to t, averaged over the positions
    that the task's mask counts; with several labels, the sum of one cross-entropy per range of logits. Every
    step draws a fresh batch.

    With `checkpoint_dir` the run saves itself there and, called again with the same arguments, goes
    on where it was killed, or returns at once when it was finished. On a CPU, at equal thread counts, the
    weights equal those of an uninterrupted run bit for bit (models without dropout).

    Args:
        model: A module that maps tokens (batch, pos) to logits (batch, pos, vocab), or a HookedModel
            around one. Left in eval mode.
        task: Draws batches and labels.
        config: How to train; `TrainConfig()` when None.
        label: What to train on; the task's target when None. Several labels take consecutive
            ranges of the logits, in the order given.
        checkpoint_dir: Folder of the run: `train.safetensors` while it runs; with it, at the end,
            `model.safetensors` for a formal model, which `probelens.models.load` reads.
        resume: False starts at step 0 and replaces a checkpoint of this same run.
        progress: True shows a bar where there is a terminal or a notebook; a function is called after each
            step with a dict of step, steps, length, loss, accuracy and phase.
        backend: A context to train in: the name of a backend of the wrapped model ("reference"), or a
            function that returns a context manager. None leaves the model as it is. Without the CUDA
            kernels Mamba trains many times faster under "reference" than through transformers' own path.

    Returns:
        What happened, with the learning curve.

    Raises:
        InputError: A bad config or label, a vocabulary too small for the task, or a loss that is no
            longer finite (nothing is saved of that step).
        StoreError: `checkpoint_dir` holds another run, or a checkpoint that can't be read.
        KeyboardInterrupt: Passed on after the step in progress was finished and saved.

    Examples:
        >>> import probelens as pl
        >>> task = pl.tasks.Parity()
        >>> model = pl.models.build(pl.models.FormalConfig.for_task("gru", task, n_layers=1, d_model=16))
        >>> config = TrainConfig(steps=4, decay_steps=1, batch_size=8, length=6, eval_sequences=8)
        >>> train(model, task, config=config, progress=False).steps
        4
    """
    config = TrainConfig() if config is None else config
    if not isinstance(config, TrainConfig):
        raise InputError(f"config must be a TrainConfig, not a {type(config).__name__}.")
    module, context = unwrap(model, backend)
    slices = label_slices(task, label)
    check_vocabulary(module, task, slices)
    run = Run(module, task, config, slices, Path(checkpoint_dir) if checkpoint_dir is not None else None)
    run.open(resume)
    if run.done:
        run.save_model()
    else:
        with (
            _threads(config.threads), context(), differentiable(), Interrupts() as interrupts,
            _bar(progress, run) as report,
        ):  # fmt: skip
            run.loop(interrupts, report)
    module.eval()
    return TrainResult(
        task=task.name,
        labels=list(slices),
        steps=run.step,
        reached=run.reached,
        accuracy=run.history[-1]["accuracy"],
        length=config.length,
        n_params=n_params(module),
        seconds=run.seconds,
        cpu_seconds=run.cpu_seconds,
        config=config.to_dict(),
        history=run.history,
    )


@contextlib.contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _bar(progress: bool | Callable[[dict[str, Any]], None], run: Run) -> Iterator[Callable[[dict[str, Any]], None]]:
    """The function to call after each step."""
    if callable(progress):
        yield progress
        return
    with progress_bar(run.config.steps, run.task.name, progress, initial=run.step, unit="step") as bar:

        def report(row: dict[str, Any]) -> None:
            bar.total = row["steps"]
            bar.set_postfix(length=row["length"], accuracy=f"{row['accuracy']:.3f}", refresh=False)
            bar.update(1)

        yield report
