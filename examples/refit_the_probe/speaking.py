"""Which trained models may speak: a model that has not learned its task can't say where such models keep its state."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

__all__ = ["LEARNED", "MEASURED", "of_learned", "speaking"]

LEARNED = 0.95  # at the trained length
MEASURED = ("probe", "ablation", "dose", "length", "site", "convolution")


def speaking(rows: pd.DataFrame, by: Sequence[str], least: float = LEARNED) -> pd.DataFrame:
    """Rows without what was measured on models that did not learn; how they trained and answered stays.

    Args:
        rows: Rows of any kinds; a model without a row on its answers is taken to have learned.
        by: The columns that tell one model from another.
        least: Accuracy at the shortest length that counts as learned.
    """
    answers = rows[rows["kind"] == "behaviour"]
    if answers.empty or "span" not in answers:
        return rows
    answers = answers[answers["span"] == "all"].sort_values("length", kind="stable").drop_duplicates(list(by))
    lost = answers[answers["accuracy"] < least][list(by)].assign(lost=True)
    if lost.empty:
        return rows
    gone = rows[list(by)].merge(lost, on=list(by), how="left")["lost"].notna().to_numpy()
    return rows[~(gone & rows["kind"].isin(MEASURED).to_numpy())]


def of_learned(answers: pd.DataFrame) -> pd.DataFrame:
    """Answers of the seeds that learned, or of all seeds where none did.

    Columns ``n_seeds`` and ``n_learned`` say how many there are of each.
    """
    made = []
    for _, part in answers.groupby(["arch", "task"], sort=False):
        at = part[part["length"] == part["length"].min()].set_index("train_seed")["accuracy"]
        good = at[at >= LEARNED].index
        kept = part[part["train_seed"].isin(good)] if len(good) else part
        made.append(kept.assign(n_seeds=at.index.nunique(), n_learned=len(good)))
    return pd.concat(made) if made else answers.assign(n_seeds=0, n_learned=0)
