"""Rows of an interchange from what each run answered: shares with intervals, p values, the checks, and the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from probelens.errors import ShapeError
from probelens.hooks.trials import agree
from probelens.numerics.effects import max_t_over_sites
from probelens.numerics.shares import exact_interval, share_interval
from probelens.subspaces.matched import OVERLAP

__all__ = ["groups_of_pairs", "interchange_rows", "share", "verdict"]

WORKS, CHANCE = 0.5, 0.2
_DOUBT = "the model itself answers most of their clean sides otherwise"
_RANDOM = ("random", "random_matched")
_CONTROLS = (*_RANDOM, "orthogonal_pca")
Cell = tuple[Any, Any, Any]


def groups_of_pairs(pairs: Any, groups: Any = None) -> Tensor:
    """Which pairs are not independent: the groups given, those of the pairs, or pairs with one clean sequence. (example,)

    Raises:
        ShapeError: Not one group for each pair.
    """
    found = getattr(pairs, "groups", None) if groups is None else groups
    if found is None:
        return pairs.sides[0].copies()
    found = torch.as_tensor(found).cpu()
    if found.shape != (len(pairs),):
        raise ShapeError(f"groups must be (example,) = ({len(pairs)},), got {tuple(found.shape)}")
    return torch.unique(found, return_inverse=True)[1]


def share(hits: Tensor, groups: Tensor) -> dict[str, Any]:
    """A share of pairs with its 95 % interval, which has a width at 0 and 1 as well. (example,), (example,)

    The exact binomial interval where each pair is a group of its own; otherwise that of as many independent pairs as the
    groups vary like, and of as many as there are groups where all pairs answer alike. See ``numerics.shares``.
    """
    n, k = len(hits), int(hits.sum())
    if not n:
        return {"n": 0, "n_groups": 0, "iia": None, "iia_lo": 0.0, "iia_hi": 1.0}
    _, where, sizes = groups.unique(return_inverse=True, return_counts=True)
    g = len(sizes)
    if 1 < g < n:
        low, high = share_interval(torch.bincount(where, hits.double(), g), sizes)
    else:
        low, high = exact_interval(k / n * g, g)
    return {"n": n, "n_groups": g, "iia": k / n, "iia_lo": low, "iia_hi": high}


def interchange_rows(
    about: Sequence[dict[str, Any]],
    values: Tensor,
    base: Tensor,
    source: Tensor,
    correct: Tensor,
    groups: Tensor,
    same: tuple[Tensor, Tensor, Tensor, Tensor] | None,
) -> list[dict[str, Any]]:
    """Rows from what each run answered, those of pairs that agree behind the target that they belong to.

    ``values`` (row, example, 4) and ``base`` and ``source`` (example, 4) hold whether the answer is the source's, whether
    it is the base's, the logit difference, and a sum over all logits that changes when any does; ``correct`` (example,)
    the pairs that both runs answer correctly; ``groups`` (example,) which of them are not independent; ``same`` those of
    pairs that agree in the variable: (target, example, 4), the base run's and the source run's (example, 4), and their groups.
    """
    kept = correct.nonzero().flatten()
    gap = float((source[kept, 2] - base[kept, 2]).double().sum())
    rows: list[dict[str, Any]] = []
    for i, row in enumerate(about):
        moved = float((values[i, kept, 2] - base[kept, 2]).double().sum())
        rows.append(
            {
                **row, **share(values[i, kept, 0] > 0, groups[kept]),
                "recovery": moved / gap if abs(gap) > 1e-12 else None,
                "changed": not agree(values[i, :, 3], base[:, 3], half=False),
            }
        )  # fmt: skip
    targets = [row for row in rows if row["condition"] == "target"]
    agreeing: dict[Cell, dict[str, Any]] = {}
    if same is not None:
        swapped, before, other, same_groups = same
        answered = (before[:, 1] > 0).nonzero().flatten()
        anyway = float((other[answered, 1] > 0).double().mean()) if len(answered) else None
        for i, row in enumerate(targets):
            # Both runs have one answer, so "the source's" is the one that must stay.
            agreeing[_cell(row)] = {
                **{k: row[k] for k in ("site", "layer", "head", "pos", "rank", "draw")}, "condition": "same_value",
                "control_overlap": None, "variance": None, "recovery": None,
                **share(swapped[i, answered, 1] > 0, same_groups[answered]), "stays_anyway": anyway,
                "changed": not agree(swapped[i, :, 3], before[:, 3], half=False),
            }  # fmt: skip
    cells: dict[Cell, list[dict[str, Any]]] = {}
    for row in rows:
        cells.setdefault(_cell(row), []).append(row)
    _tests(cells, targets)
    for row in targets:
        here = cells[_cell(row)] + ([agreeing[_cell(row)]] if agreeing else [])
        row["controls_left_out"] = _left_out(here)
        _illusion(row, here)
        row["verdict"], row["why"] = verdict(here)
    if not agreeing:
        return rows
    out: list[dict[str, Any]] = []
    for row in rows:
        out.append(row)
        if row["condition"] == "target":
            out.append(agreeing[_cell(row)])
    return out


def _cell(row: dict[str, Any]) -> Cell:
    return row["site"], row.get("head"), row["pos"]


def _tests(cells: dict[Cell, list[dict[str, Any]]], targets: Sequence[dict[str, Any]]) -> None:
    """p of each target against its draws, and adjusted over sites and positions where all have as many."""
    draws = []
    for row in targets:
        row.update(p=None, p_adjusted=None)
        mine = cells[_cell(row)]
        for kind in ("random_matched", "random"):
            found = [r for r in mine if r["condition"] == kind and not _contains(r)]
            if found and row["iia"] is not None:
                row["p"] = (1 + sum(r["iia"] >= row["iia"] for r in found)) / (1 + len(found))
                break
        draws.append([r["iia"] for r in mine if r["condition"] == "random"] if row["iia"] is not None else [])
    counts = {len(d) for d in draws}
    if targets and len(counts) == 1 and counts != {0}:
        iia = torch.tensor([row["iia"] for row in targets], dtype=torch.float64)
        for row, p in zip(targets, max_t_over_sites(iia, torch.tensor(draws, dtype=torch.float64)).tolist()):
            row["p_adjusted"] = p


def _contains(row: dict[str, Any]) -> bool:
    return row["control_overlap"] is not None and row["control_overlap"] >= OVERLAP


def _left_out(rows: Sequence[dict[str, Any]]) -> str | None:
    """Which controls contain the target: "3 of 20 random_matched"; None where none does."""
    drawn = {kind: [r for r in rows if r["condition"] == kind] for kind in _CONTROLS}
    found = {kind: sum(map(_contains, here)) for kind, here in drawn.items()}
    return ", ".join(f"{n} of {len(drawn[kind])} {kind}" for kind, n in found.items() if n) or None


def _bound(rows: Sequence[dict[str, Any]]) -> tuple[float | None, str | None]:
    """The highest upper bound of a control that is one, and its kind; None where no random subspace is one."""
    controls = [r for r in rows if r["condition"] in _CONTROLS and not _contains(r)]
    if not any(r["condition"] in _RANDOM for r in controls):
        return None, None
    highest = max(controls, key=lambda r: r["iia_hi"])
    return highest["iia_hi"], highest["condition"]


def _works(row: dict[str, Any], bound: float) -> bool | None:
    """Whether the answer follows beyond the controls; None where the intervals don't say."""
    if row["iia_lo"] > bound and row["iia_lo"] >= WORKS:
        return True
    return False if row["iia_hi"] < WORKS or row["iia_hi"] <= bound else None


def _illusion(target: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    """Illusory: the subspace works, and the part of it that its only reader sees does not."""
    parts = {r["condition"]: r for r in rows if r["condition"] in ("row_space", "null_space")}
    if not parts or target["iia"] is None:
        return
    if parts["null_space"]["changed"]:
        why = f"what {target['site']!r}'s reader cannot see moves the output all the same, so it is not the only reader"
        target.update(illusory=None, illusory_why=why)
        return
    bound, _ = _bound(rows)
    q, seen = (_works(row, bound or 0.0) for row in (target, parts["row_space"]))
    target["illusory"] = False if q is not True or seen else True if seen is False else None
    if target["illusory"] is None:
        target["illusory_why"] = "the interval of the part that is read is too wide to say"


def verdict(rows: Sequence[dict[str, Any]]) -> tuple[str, str | None]:
    """What the interchanges at one site and position say, in a word that ``interchange`` explains, and why."""
    by_kind = {row["condition"]: row for row in reversed(rows)}
    target, full, complement = (by_kind[kind] for kind in ("target", "full", "complement"))
    if target["iia"] is None:
        return "underpowered", "no pair is answered correctly by both runs"
    if "noise" in by_kind and not by_kind["noise"]["changed"]:
        return "unread", "noise as large as the activations changes nothing in the output"
    if not target["rank"]:
        return "no control", target["control_problem"]
    bound, highest = _bound(rows)
    everything = True if full["iia_lo"] >= WORKS else False if full["iia_hi"] < WORKS else None
    q = _works(target, bound or 0.0)
    if everything is False and q is not True:
        return "not here", None
    if bound is None and target["iia_hi"] >= WORKS:
        drawn = any(row["condition"] in _RANDOM for row in rows)
        why = f"every random subspace shares {OVERLAP} or more of it" if drawn else "no random subspace was drawn"
        return "no control", target.get("control_problem") or why
    if everything is None:
        return "underpowered", "the interval of the full swap is too wide"
    if q is None:
        close = target["iia_lo"] >= WORKS
        return "underpowered", f"a control ({highest}) comes close" if close else "the subspace's interval is too wide"
    if not q:
        if target["iia_hi"] < WORKS:
            return "used elsewhere", None
        return "unspecific", f"a control ({highest}) moves the answer as often"
    # The answer follows the subspace beyond every control.
    same, parts = by_kind.get("same_value"), "row_space" in by_kind
    if target.get("illusory"):
        return "illusory", "the part of the subspace that is read does not move the answer by itself"
    if parts and target.get("illusory") is None and not by_kind["null_space"]["changed"]:
        return "underpowered", target.get("illusory_why")
    if same is not None and not same["n"]:
        return "underpowered", "the model answers no pair that agrees in the variable as the pairs say"
    if same is not None and same["iia_hi"] < 1 - CHANCE:
        why = "the answer moves also between runs that agree in the variable"
        doubt = same.get("stays_anyway")
        return "unspecific", why if doubt is None or doubt >= WORKS else f"{why}, if they do: {_DOUBT}"
    if same is not None and same["iia_lo"] < 1 - CHANCE:
        return "underpowered", "too few pairs that agree in the variable to say that their answer stays"
    if target.get("readable") == "no":
        return "unreadable", "the probe reads no more there than the best guess without activations"
    if target.get("readable") == "can't tell":
        return "underpowered", "the interval of the probe doesn't say whether it reads the label there"
    if complement["iia_hi"] < CHANCE:
        return "used", None
    if complement["iia"] >= CHANCE:
        return "spread", None
    return "underpowered", "the interval of everything but the subspace is too wide"
