"""Rows of runs: read, merged, and chosen, since a model that has not learned its task can't say where such models keep its state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

import probelens as pl
from probelens.results.files import read_rows

LEARNED = 0.95  # at the trained length, beyond the 20th position: what comes first is easy
MEASURED = ("probe", "ablation", "dose", "length", "interchange", "site", "convolution")


def learned_only(rows: pd.DataFrame, by: Sequence[str], least: float = LEARNED) -> pd.DataFrame:
    """Rows without what was measured on models that did not learn; how they trained and answered stays.

    ``by`` are the columns that tell one model from another, ``least`` the accuracy that counts as learned: at the
    shortest length, beyond the 20th position where that is known. A model without a row on its answers has learned.
    """
    answers = rows[rows["kind"] == "behaviour"]
    if answers.empty or "span" not in answers:
        return rows
    answers = _late(answers, by)
    lost = answers[answers["accuracy"] < least][list(by)].assign(lost=True)
    if lost.empty:
        return rows
    unlearned = rows[list(by)].merge(lost, on=list(by), how="left")["lost"].notna().to_numpy()
    return rows[~(unlearned & rows["kind"].isin(MEASURED).to_numpy())]


def _late(answers: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """The answers that each model is judged by: at the shortest length, at late positions where they are reported."""
    judged = where(answers, span=("late", "all"))
    judged = judged.assign(_late=judged["span"] == "late")
    return judged.sort_values(["length", "_late"], ascending=[True, False], kind="stable").drop_duplicates(list(by))


def of_learned(answers: pd.DataFrame) -> pd.DataFrame:
    """Answers over all positions of the seeds that learned, or of all seeds where none did.

    Columns ``n_seeds`` and ``n_learned`` say how many there are of each.
    """
    made = []
    judged = _late(answers, ("arch", "task", "train_seed"))
    good = judged[judged["accuracy"] >= LEARNED]
    for (arch, task), part in where(answers, span="all").groupby(["arch", "task"], sort=False):
        seeds = where(good, arch=arch, task=task)["train_seed"]
        kept = part[part["train_seed"].isin(seeds)] if len(seeds) else part
        made.append(kept.assign(n_seeds=part["train_seed"].nunique(), n_learned=len(seeds)))
    return pd.concat(made) if made else answers.assign(n_seeds=0, n_learned=0)


def merged(paths: Sequence[Path], by: Sequence[str]) -> pd.DataFrame:
    """The rows of several runs together; a model that two of them have is the later one's.

    ``by`` are the columns that tell one model from another. A StoreError says that a file isn't there, is damaged, or
    lacks one of them.
    """
    kept: dict[Any, pd.DataFrame] = {}
    for path in paths:
        if not path.is_file():
            raise pl.StoreError(f"no rows at {str(path)!r}: give the rows.parquet of a run folder")
        rows = read_rows(path)
        if lacking := [column for column in by if column not in rows]:
            raise pl.StoreError(f"{str(path)!r} lacks the columns {', '.join(lacking)}: it isn't a run of this recipe")
        kept |= dict(iter(rows.groupby(list(by), sort=False)))
    return pd.concat(kept.values(), ignore_index=True)


def each(table: pd.DataFrame) -> Iterator[Any]:
    """The rows of a table, each column an attribute."""
    return table.itertuples()


def where(table: pd.DataFrame, **columns: Any) -> pd.DataFrame:
    """The rows whose columns have these values; of a tuple, any of them."""
    for name, value in columns.items():
        table = table[table[name].isin(value if isinstance(value, tuple) else (value,))]
    return table


def best(table: pd.DataFrame, column: str) -> Any:
    """The row with the largest value, the first of equals."""
    return table.iloc[int(table[column].to_numpy().argmax())]


def slim(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows without columns that are empty, or that only repeat the run: small enough to publish."""
    kept = rows.dropna(axis=1, how="all").drop(columns=["cell"], errors="ignore")
    # A scale is identified by its value, so it is not rounded.
    numbers = kept.select_dtypes("float64").columns.drop("embedding_std", errors="ignore")
    return kept.astype(dict.fromkeys(numbers, "float32"))
