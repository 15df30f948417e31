"""What the recipes for pretrained models share: device and precision, the folder's identity, failures, saved rows."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import probelens as pl
from probelens.experiments import RunRecord, Store, cell_key, run_grid, versions
from probelens.results.files import atomic_path, read_rows, write_rows

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

    from probelens.experiments.grid import RunCell
    from probelens.results.report import Claim

__all__ = [
    "best",
    "claims_table",
    "command_of",
    "device_of",
    "each",
    "fill",
    "finished_rows",
    "identity",
    "is_mamba",
    "merged",
    "mixed",
    "quiet",
    "run_cells",
    "told",
    "unfinished",
    "untrained",
    "write_claims",
    "write_pictures",
]


def device_of(config: Mapping[str, Any]) -> str:
    """The device a cell runs on: what its config says, else the GPU where there is one."""
    found = str(config.get("device", "auto"))
    return ("cuda" if torch.cuda.is_available() else "cpu") if found == "auto" else found


def is_mamba(model: pl.HookedModel) -> bool:
    """Whether the model has Mamba mixers, which train many times faster under the reference backend on a CPU."""
    return model.cfg.architecture.startswith("hf-mamba")


def mixed(
    model: pl.HookedModel, bf16: bool = False, checkpointing: bool = False
) -> Callable[[], AbstractContextManager[Any]]:
    """The context to train in, as ``probelens.training.train`` takes it.

    Args:
        model: The model.
        bf16: bfloat16 autocast; weights and optimizer stay in float32.
        checkpointing: Recompute activations in the backward pass; transformers' models only.
    """

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        module: Any = model.module
        with contextlib.ExitStack() as stack:
            if is_mamba(model):
                stack.enter_context(model.backend("reference"))
            if bf16:
                stack.enter_context(torch.autocast(model.cfg.device.type, dtype=torch.bfloat16))
            if checkpointing:
                module.gradient_checkpointing_enable({"use_reentrant": False})
                stack.callback(module.gradient_checkpointing_disable)
            yield

    return context


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the progress bars that transformers draws for every file it reads or writes."""
    from transformers.utils import logging

    before = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if before:
            logging.enable_progress_bar()


def untrained(model: pl.HookedModel, seed: int) -> pl.HookedModel:
    """The same architecture as its library initialises it, on the same device."""
    module: Any = model.module
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        fresh = type(module)(module.config)
    return pl.wrap(fresh.eval().to(model.cfg.device), tokenizer=getattr(model, "tokenizer", None))


def identity(name: str) -> str:
    """What tells two models of one name apart: a hash of a folder's config and weights, "" for a hub id."""
    folder = Path(name)
    if not folder.is_dir():
        return ""
    digest = hashlib.sha256()
    for path in sorted([folder / "config.json", *folder.glob("*.safetensors"), *folder.glob("*.bin")]):
        if path.is_file():
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]


def finished_rows(out: str) -> pd.DataFrame:
    """The rows of a run folder's finished cells, also written to ``rows.parquet``.

    Raises:
        probelens.StoreError: No cell is finished.
    """
    store = Store(out)
    if not store.keys():
        raise pl.StoreError(f"no model in {out!r} is finished, so there is nothing to report. Run it first.")
    rows = store.all_rows()
    write_rows(store.folder / "rows.parquet", rows)
    return rows


def merged(paths: Sequence[Path], by: Sequence[str]) -> pd.DataFrame:
    """The rows of several runs together; a model that two of them have is the later one's.

    Args:
        paths: Files of rows, at least one.
        by: The columns that tell one model from another.

    Raises:
        probelens.StoreError: A file isn't there, is damaged, or lacks one of the columns.
    """
    import pandas as pd

    kept: dict[Any, pd.DataFrame] = {}
    for path in paths:
        if not path.is_file():
            raise pl.StoreError(f"no rows at {str(path)!r}: give the rows.parquet of a run folder")
        rows = read_rows(path)
        if lacking := [column for column in by if column not in rows]:
            raise pl.StoreError(
                f"{str(path)!r} lacks the columns {', '.join(lacking)}: it isn't a run of this recipe"
            )
        kept |= dict(iter(rows.groupby(list(by), sort=False)))
    return pd.concat(kept.values(), ignore_index=True)


def run_cells(
    recipe: str,
    config: Any,
    cells: Sequence[Mapping[str, Any]],
    run_cell: RunCell,
    free: Sequence[str],
    progress: bool,
    report: Callable[[RunRecord], object],
) -> Path:
    """Run what a run folder lacks, report what is there, and say what failed.

    Args:
        recipe: Its name.
        config: Its settings, with ``out`` and ``workers``.
        cells: The settings of each cell.
        run_cell: As for ``run_grid``.
        free: Settings that may differ from those of the run that the folder holds.
        progress: Show progress.
        report: Called with the run's record once any cell is finished.

    Returns:
        The run folder.

    Raises:
        probelens.InputError: The folder holds another run.
        probelens.ProbelensError: A cell failed: which, and where its traceback is.
    """
    store = Store(config.out)
    record = RunRecord(recipe, dataclasses.asdict(config), [cell_key(cell) for cell in cells], versions())
    record.start(store.folder, free=free)
    done = run_grid(run_cell, cells, store, workers=config.workers, progress=progress)
    if store.keys():
        report(record)
    if done.failed:
        told = [
            f"{text.strip().splitlines()[-1]} ({store.cell(key) / 'error.txt'})"
            for key, text in done.failed.items()
        ]
        first = f"{len(told)} of {len(done.keys)} models failed; the others are kept and reported:"
        raise pl.ProbelensError("\n  ".join([first, *told]))
    return store.folder


def command_of(recipe: str, config: Any) -> str:
    """The command that makes a run of these settings again: what differs from the recipe's defaults is said."""
    own = dataclasses.asdict(type(config)())
    said = [
        f"--set {k}={','.join(map(str, v)) if isinstance(v, (list, tuple)) else v}"
        for k, v in dataclasses.asdict(config).items()
        if k not in ("out", "workers") and v != own[k]
    ]
    return " ".join([f"probelens run {recipe}", *said])


def unfinished(record: RunRecord, folder: Path) -> dict[str, str]:
    """What a report must say of cells that were planned and are not in it; empty where all are."""
    done = set(Store(folder).keys())
    missing = [key for key in record.cells if key not in done]
    if not missing:
        return {}
    return {
        "Not finished": f"{len(missing)} of {len(record.cells)} cells failed or were not run; they are in no number here"
    }


def write_claims(claims: Sequence[Claim], folder: Path) -> None:
    """Write ``claims.parquet``; ``agrees`` is True, False or None, the rest is text."""
    import pandas as pd

    rows = [{**{k: str(v) for k, v in vars(claim).items()}, "agrees": claim.agrees} for claim in claims]
    write_rows(folder / "claims.parquet", pd.DataFrame(rows).astype({"agrees": "boolean"}))


def write_pictures(figures: Mapping[str, go.Figure | None], folder: Path) -> None:
    """Write an SVG of each figure, on white; needs kaleido and a Chrome."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        if figure is not None:
            with atomic_path(folder / f"{name}.svg") as part:
                figure.update_layout(paper_bgcolor="white", plot_bgcolor="white").write_image(
                    part, format="svg"
                )


def told(main: Callable[[], object]) -> None:
    """Run a command; what it can't use is said in a sentence, with exit status 2."""
    try:
        main()
    except pl.ProbelensError as err:
        print(err, file=sys.stderr)
        sys.exit(2)


def claims_table(claims: Sequence[Claim]) -> str:
    """The claims as a Markdown table."""
    word = {True: "yes", False: "no", None: "can't say"}
    lines = ["| claim | paper | here | 95 % interval | agrees |", "|---|---|---|---|---|"]
    for claim in claims:
        ours = f"{claim.ours}. {claim.note}" if claim.note else str(claim.ours)
        lines.append(f"| {claim.claim} | {claim.paper} | {ours} | {claim.interval} | {word[claim.agrees]} |")
    return "\n".join(lines) + "\n"


def fill(page: str, tables: Mapping[str, str]) -> str:
    """A page with its tables written again: each stands between ``<!-- NAME -->`` and ``<!-- end NAME -->``.

    Raises:
        probelens.InputError: The page has none of these marks.
    """
    if not any(f"<!-- {name} -->" in page for name in tables):
        raise pl.InputError(
            f"the page has no table to write again: none of the marks {', '.join(f'<!-- {n} -->' for n in tables)}"
        )
    for name, table in tables.items():
        first, last = f"<!-- {name} -->", f"<!-- end {name} -->"
        if first in page:
            head, rest = page.split(first, 1)
            page = f"{head}{first}\n\n{table}\n{last}{rest.split(last, 1)[1]}"
    return page


def each(table: pd.DataFrame) -> Iterator[Any]:
    """The rows of a table, a column an attribute."""
    return table.itertuples()


def best(table: pd.DataFrame, column: str) -> Any:
    """The row with the largest value, the first of equals."""
    return table.iloc[int(table[column].to_numpy().argmax())]
