"""What ``probelens profile`` does: a task for a model, its profile in a run folder, and the report of that folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from probelens.cli.profile_report import ProfileSettings, write
from probelens.errors import InputError, StoreError
from probelens.experiments.owner import owned
from probelens.experiments.record import RunRecord, versions
from probelens.experiments.settings import arguments
from probelens.results.files import write_rows

if TYPE_CHECKING:
    from probelens.hooks.model import HookedModel
    from probelens.profiling import Profile
    from probelens.tasks import Task

NAME = "profile"
FILE = "profile.safetensors"


def task_for(model: HookedModel, source: str, name: str | None, settings: Sequence[str] = ()) -> Task:
    """The task of this name, or the one that the model in the folder ``source`` was trained on.

    Its arguments are ``settings``, as ``key=value``, over those that the model was trained with.
    """
    from probelens import tasks

    trained = _trained_on(Path(source))
    if name is None:
        if trained is None:
            raise InputError(
                f"{source!r} doesn't say what it was trained on. Name a task: "
                "--task parity, dyck, counter, flip_flop, code_depth, or a group such as S3"
            )
        base = trained
    else:
        base = dict(tasks.make(name).config)
        if trained is not None and all(trained.get(key) == base.get(key) for key in ("task", "group")):
            base = trained
    kind = type(tasks.make(base))
    options = arguments(kind, settings, "--task-set")
    if "tokenizer" in base and model.tokenizer is not None:
        options["tokenizer"] = model.tokenizer
    task = tasks.make(base, **options)
    _check_fit(model, task)
    return task


def profile_model(
    model: HookedModel,
    task: Task,
    folder: Path,
    settings: ProfileSettings,
    *,
    labels: Sequence[str] | None = None,
    source: str = "",
    progress: bool = False,
) -> Profile:
    """Profile a model and write ``profile.safetensors``, ``rows.parquet`` and ``report.html``; the report names ``source``."""
    from probelens.profiling import profile
    from probelens.running.weights import weights_hash

    limit, length = model.cfg.n_ctx, settings.length + task.bos
    if limit and length > limit:
        raise InputError(
            f"length={settings.length}: with its start token that is {length} of {limit} positions at most"
        )
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise StoreError(f"{str(folder)!r} is a file, not a folder. Choose another run folder.")
    if os.path.exists(folder / "run.json") and RunRecord.load(folder).recipe != NAME:
        raise StoreError(f"{str(folder)!r} holds a run of another recipe. Choose another run folder.")
    config = {
        "model": source or model.cfg.model_name, "weights": weights_hash(model), "task": dict(task.config),
        "labels": list(labels or [task.target]), **asdict(settings),
    }  # fmt: skip
    record = RunRecord(NAME, config, versions=versions())
    with owned(folder):
        # Before the measurement: a folder that holds another profile, or can't be written, should be noticed now.
        # Where nothing was finished, there is nothing to keep.
        if (folder / FILE).exists():
            record.start(folder, free=())
        else:
            record.save(folder)
        options = asdict(settings)
        n_pairs = options.pop("n_pairs")
        found = profile(
            model, task, labels=labels, pairs=_pairs(task, n_pairs, settings), untrained=_untrained(model),
            progress=progress, **options,
        )  # fmt: skip
        found.save(folder / FILE)
        report_again(folder)
    return found


def need_finished(folder: Path) -> None:
    """Refuse (StoreError) the folder of a profile that was interrupted."""
    if not (folder / FILE).is_file():
        raise StoreError(f"the profile in {str(folder)!r} is not finished. Run `probelens profile` again.")


def report_again(folder: Path) -> Path:
    """Write the rows and the report of a profile's folder from what is saved there."""
    import pandas as pd

    from probelens.profiling import Profile

    record = RunRecord.load(folder)
    found = Profile.load(folder / FILE)
    write_rows(folder / "rows.parquet", pd.DataFrame(rows(found)))
    return write(folder / "report.html", found, record)


def rows(found: Profile) -> list[dict[str, Any]]:
    """Every number of a profile as rows, distinguished by the column ``kind``."""
    own = [{"kind": "behaviour", "span": span, "accuracy": value} for span, value in found.behaviour.items()]
    return [{"model": found.model, **row} for row in [*own, *found.measurements()]]


def _pairs(task: Task, n: int, settings: ProfileSettings) -> dict[str, Any]:
    """Pairs edited at one and the same position, so that a map over positions can be read."""
    if not n:
        return {}
    pairs = task.pairs(20 * n, length=settings.length, seed=settings.seed)
    common = pairs.edit_pos.bincount().argmax()
    return {task.target: pairs[(pairs.edit_pos == common).nonzero().flatten()[:n]]}


def _untrained(model: HookedModel) -> HookedModel | None:
    """The same formal model at other random weights; None for models that can't be made again."""
    from probelens import models

    config = models.config_of(model.module)
    return None if config is None else models.untrained(model, config.seed + 1000)


def _check_fit(model: HookedModel, task: Task) -> None:
    taken, classes = model.cfg.d_vocab, task.n_classes[task.target]
    given = model.cfg.d_vocab_out or taken
    if taken >= task.d_vocab and given >= classes:
        return
    raise InputError(
        f"{model.cfg.model_name} doesn't fit the task {task.name}: the task has {task.d_vocab} token ids and answers one "
        f"of {classes} classes of {task.target!r}; the model takes {taken} ids and gives {given} logits. "
        "Give a model that was trained on this task, or the task's arguments with --task-set key=value."
    )


def _trained_on(folder: Path) -> dict[str, Any] | None:
    """The task that a training run in this folder was for, if there is one."""
    from probelens import tasks
    from probelens.models.training_run import STATE_FILE, TrainState

    if not os.path.isfile(folder / STATE_FILE):
        return None
    try:
        config = TrainState.load(folder / STATE_FILE).identity["task"]
        tasks.make(config)
    except (StoreError, InputError, KeyError, TypeError):
        # A task of the user's own, or no state of a run: the command line says which task it is.
        return None
    return dict(config)
