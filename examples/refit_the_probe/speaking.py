"""Which trained models may speak: a model that has not learned its task can't say where such models keep its state."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

__all__ = ["LEARNED", "MEASURED", "of_learned", "speaking"]

LEARNED = 0.95  # at the trained length, beyond the 20th position: what comes first is easy
MEASURED = ("probe", "ablation", "dose", "length", "site", "convolution")


def speaking(rows: pd.DataFrame, by: Sequence[str], least: float = LEARNED) -> pd.DataFrame:
    """Rows without what was measured on models that did not learn; how they trained and answered stays.

    Args:
        rows: Rows of any kinds; a model without a row on its answers is taken to have learned.
        by: The columns that tell one model from another.
        least: Accuracy that counts as learned: at the shortest length, beyond the 20th position where that is known.
    """
    answers = rows[rows["kind"] == "behaviour"]
    if answers.empty or "span" not in answers:
        return rows
    answers = _late(answers, by)
    lost = answers[answers["accuracy"] < least][list(by)].assign(lost=True)
    if lost.empty:
        return rows
    gone = rows[list(by)].merge(lost, on=list(by), how="left")["lost"].notna().to_numpy()
    return rows[~(gone & rows["kind"].isin(MEASURED).to_numpy())]


def _late(answers: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """Of each model the answers that it is judged by: at the shortest length, late positions where they are known apart."""
    judged = answers[answers["span"].isin(["late", "all"])]
    order = judged.assign(_late=judged["span"] == "late").sort_values(
        ["length", "_late"], ascending=[True, False], kind="stable"
    )
    return order.drop_duplicates(list(by))


def of_learned(answers: pd.DataFrame) -> pd.DataFrame:
    """Answers over all positions of the seeds that learned, or of all seeds where none did.

    Columns ``n_seeds`` and ``n_learned`` say how many there are of each.
    """
    made = []
    judged = _late(answers, ("arch", "task", "train_seed"))
    good = judged[judged["accuracy"] >= LEARNED]
    for (arch, task), part in answers[answers["span"] == "all"].groupby(["arch", "task"], sort=False):
        seeds = good[(good["arch"] == arch) & (good["task"] == task)]["train_seed"]
        kept = part[part["train_seed"].isin(seeds)] if len(seeds) else part
        made.append(kept.assign(n_seeds=part["train_seed"].nunique(), n_learned=len(seeds)))
    return pd.concat(made) if made else answers.assign(n_seeds=0, n_learned=0)
