"""An ablated subspace beside its controls: what it costs beyond them, with interval, p value and the p adjusted for sites."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from probelens.ablation.controls import CONTROLS
from probelens.errors import InputError
from probelens.numerics.effects import effect, max_t_over_sites
from probelens.numerics.permutation import holm
from probelens.subspaces.matched import OVERLAP

Adjust = Literal["max_t", "holm"]
ROOM = 1e-6  # distance above chance below which a model has nothing to lose, and damage no scale
NONE: dict[str, Any] = dict.fromkeys(
    ("effect", "effect_lo", "effect_hi", "effect_against", "effect_p", "effect_p_adjusted")
)


@dataclass(frozen=True)
class Compared:
    """A target row, its mean cost, and those of the draws that it is compared with, (draw,)."""

    row: dict[str, Any]
    cost: Tensor
    draws: Tensor


def need_adjust(adjust: str) -> None:
    """Refuse an unknown way to adjust p values."""
    if adjust not in get_args(Adjust):
        raise InputError(f"adjust={adjust!r} is not known. Allowed: {', '.join(map(repr, get_args(Adjust)))}")


def compare(
    rows: list[dict[str, Any]], values: Tensor, clean: Tensor, chance: float | None, seed: int, cost: int | None,
    adjust: Adjust, most: float | None,
) -> None:  # fmt: skip
    """Write damages of the controls, N = D of the subspace − mean D of its control, and p values into target rows.

    ``values`` (row, example) and ``clean`` (example,) are the metric; ``cost`` is the sign of a drop that hurts, None
    where it isn't known; ``most`` is the largest change of an example, None without a limit.
    """
    where: dict[tuple[str, str], list[int]] = defaultdict(list)
    for i, row in enumerate(rows):
        where[row["site"], row.get("condition", "")].append(i)
    # Without a chance level there is no scale, and the effect is in the metric's own unit.
    room = torch.ones_like(clean) if chance is None else clean - chance
    found: list[Compared] = []
    for i, row in enumerate(rows):
        if row.get("condition") != "target":
            continue
        row.update(NONE)
        drawn: dict[str, list[int]] = {kind: where[row["site"], kind] for kind in CONTROLS}
        for kind, mine in drawn.items():
            damages = [rows[j]["damage"] for j in mine if rows[j]["damage"] is not None]
            row[f"damage_{kind}"] = sum(damages) / len(damages) if damages else None
        against = control_of(row, {kind: len(mine) for kind, mine in drawn.items()})
        if against is None or not room.mean() > ROOM:
            continue
        sign = cost or 1
        costs = sign * (clean - values[i]), sign * (clean - values[drawn[against]])
        beyond = effect(*costs, room, seed=seed, most=most)
        low, high = sorted((sign * beyond.low, sign * beyond.high))
        row.update(effect=sign * beyond.estimate, effect_lo=low, effect_hi=high, effect_against=against)
        if cost is not None:
            row["effect_p"] = beyond.p
            found.append(Compared(row, costs[0].mean(), costs[1].mean(1)))
    if found:
        for one, p in zip(found, _adjusted(found, adjust), strict=True):
            one.row["effect_p_adjusted"] = max(p, one.row["effect_p"])


def control_of(row: dict[str, Any], draws: dict[str, int]) -> str | None:
    """The control that a target's effect is measured from: of equal variance, unless those contain the target; or None."""
    if draws["random_matched"] > 1 and (row.get("control_overlap") or 0.0) < OVERLAP:
        return "random_matched"
    return "random" if draws["random"] > 1 else None


def _adjusted(found: list[Compared], adjust: Adjust) -> list[float]:
    if adjust == "holm":
        return holm([one.row["effect_p"] for one in found]).tolist()
    same = min(len(one.draws) for one in found)
    return max_t_over_sites(
        torch.stack([one.cost for one in found]), torch.stack([one.draws[:same] for one in found])
    ).tolist()
