"""The words for an ablation at one site: what became of the variable, and whether the model needs the directions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from probelens.ablation.scoring import COST
from probelens.numerics.association import ASSOCIATED
from probelens.subspaces.matched import OVERLAP

FLOOR = 0.2
MEANINGFUL = 0.05  # of the accuracy above chance, or nats: a smaller effect counts as none
SIGNIFICANT = 0.05
SHIFTED = 1.0  # standard deviations from the activations' own mean


def verdict(
    *,
    floor: bool,
    readout: bool,
    before: bool | None,
    after: bool | None,
    unread: bool = False,
    power: bool | None = None,
) -> str:
    """The verdict on an ablation at one site, one of the words that ``ablate`` explains.

    ``before`` and ``after`` say whether any probe reads the variable, ``power`` whether the probes read a planted
    residue; None if that wasn't tried.
    """
    if unread:
        return "unread"
    if floor:
        return "floor"
    if readout:
        return "tautological"
    if after is None:
        return "not refitted"
    if after:
        return "inconclusive"
    if power is False:
        return "underpowered"
    return "erased" if before else "absent"


def needed(row: Mapping[str, Any], beside: Sequence[Mapping[str, Any]], metric: Any) -> str:
    """Whether the model needs the directions of a target row: "yes", "no" or "can't tell"; ``beside`` are its controls."""
    if row["verdict"] == "unread":
        return "no"
    sign = COST.get(metric) if isinstance(metric, str) else None
    if row["effect"] is None or sign is None or row["verdict"] in ("floor", "tautological", "absent"):
        return "can't tell"
    low, high = sorted(sign * row[end] for end in ("effect_lo", "effect_hi"))
    if (row.get("association") or 0.0) >= ASSOCIATED and not row.get("given"):
        return "can't tell"  # the cost may be that of the label which it goes with
    if low > 0 and row["effect_p_adjusted"] <= SIGNIFICANT and _fair(row, beside, sign):
        # Beyond, the cost may be that of the value put in, and the controls put in none.
        return "yes" if (row.get("mean_shift") or 0.0) <= SHIFTED else "can't tell"
    if row["verdict"] != "erased":
        return "can't tell"
    room = 1.0 if row["chance"] is None else row["clean"] - row["chance"]
    if max(sign * row["lo"], sign * row["hi"]) < MEANINGFUL * room:
        return "no"  # it costs nothing, whatever the controls cost
    shared = [r["control_overlap"] for r in beside if r["condition"] == row["effect_against"]]
    if high < MEANINGFUL and sum(shared) / len(shared) < OVERLAP:
        return "no"
    return "can't tell"


def _fair(row: Mapping[str, Any], beside: Sequence[Mapping[str, Any]], sign: int) -> bool:
    """Whether something that removes much variance, and not the target, was compared with, and costs less."""
    if row["effect_against"] == "random_matched":
        return True
    # Subspaces of equal rank remove less variance than the target; the leading components orthogonal to it don't.
    other = [r for r in beside if r["condition"] == "orthogonal_pca"]
    return bool(other) and min(sign * row["lo"], sign * row["hi"]) > max(
        sign * r[end] for r in other for end in ("lo", "hi")
    )
