"""The four answers of a profile at one site: readable, needed, sufficient, used, each with the numbers it rests on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from probelens.errors import MetricError
from probelens.patching.result import PatchResult
from probelens.probing.result import best_guess, read_above
from probelens.results.columns import Column

__all__ = ["ANSWERS", "BY_CONSTRUCTION", "interchanged", "needed", "patched", "readable"]

Answer = Literal["yes", "no", "can't tell"]
HALF = 0.5
BY_CONSTRUCTION = (
    "by_construction"  # in a patch result's ``extra``: cells, as [site, position], whose recovery is fixed in advance
)
_SHARE = "fraction of 1"

ANSWERS = (
    Column("readable", str,
        '"yes" where the probe\'s interval is over its best baseline + 0.02, or a quarter of what is left where that is less; "no" '
        "where it is not above. Where the last tokens tell the label in 95 % or more, it has to be as good, and over the others.",
    ),
    Column(
        "needed", str | None,
        '"yes" where removing the class means costs more than its controls do, by the adjusted p and the interval of the '
        'effect, and the label can be read there; "no" or "can\'t tell"; None without an ablation there, or of an earlier version.',
    ),
    Column(
        "sufficient", str | None,
        '"yes" where one patched position restores half of the gap or more, by its interval; cells that are fixed by '
        "construction don't count; None without pairs.",
    ),
    Column(
        "used", str | None,
        '"yes" where the answer follows the class means of another run and nothing else does it (verdict "used"), and '
        'the label can be read there; "no" where it doesn\'t; "can\'t tell"; None without pairs that differ in the label.',
    ),
    Column("baseline", float, "The best guess of the label without its state.", _SHARE),
    Column("filter_drop", float | None, "What removing the probe's own rows costs.", _SHARE),
    Column("filter_refit_accuracy", float | None, "Accuracy of a linear probe fitted after that.", _SHARE),
    Column("recovery", float | None, "Largest share of the gap that one patched position restores.", "fraction of the gap"),
    Column("recovery_lo", float | None, "Lower end of its 95 % interval.", "fraction of the gap"),
    Column("recovery_hi", float | None, "Upper end of it.", "fraction of the gap"),
    Column("recovery_pos", str | None, "That position."),
    Column("iia", float | None, "Pairs whose answer becomes the source's when only the class means' span is swapped.", _SHARE),
    Column("iia_lo", float | None, "Lower end of its 95 % interval.", _SHARE),
    Column("iia_hi", float | None, "Upper end of it.", _SHARE),
    Column("iia_complement", float | None, "The same when everything but that is swapped.", _SHARE),
    Column("interchange", str | None, "Verdict of the interchange; see `interchange`."),
)  # fmt: skip


def _answer(low: float | None, high: float | None, bound: float) -> Answer:
    """Whether a number with this interval is above a bound."""
    if low is None or high is None or low != low or high != high:
        return "can't tell"
    return "yes" if low > bound else "no" if high <= bound else "can't tell"


def readable(row: Mapping[str, Any], baseline: float) -> dict[str, Any]:
    """Whether a probe reads more than the best guess without a state."""
    return {"readable": read_above(row), "baseline": max(baseline, best_guess(row))}


def needed(target: Mapping[str, Any] | None, beside: Mapping[str, Any] | None, readable: str) -> dict[str, Any]:
    """What removing the class means says, where they are means of something that can be read, and what probe rows cost."""
    word = None if target is None else target.get("needed")
    out: dict[str, Any] = {"needed": "can't tell" if word == "yes" and readable != "yes" else word}
    if target is not None and target.get("verdict") == "erased" and readable == "no":
        out["verdict"] = "absent"  # what is guessed as well without a state was never read from one
    if beside is not None:
        out.update(
            filter_drop=beside["drop"], filter_refit_accuracy=beside.get("refit_accuracy"),
        )  # fmt: skip
        if beside.get("variance") is not None:
            out["filter_variance"] = beside["variance"]  # of the rows on which `variance` is measured
    return out


def patched(result: PatchResult | None, site: str) -> dict[str, Any]:
    """Whether one patched position restores the answer, by the cells that aren't fixed by construction."""
    out: dict[str, Any] = dict.fromkeys(("sufficient", "recovery", "recovery_lo", "recovery_hi", "recovery_pos"))
    if result is None or site not in result.sites:
        return out
    i = result.sites.index(site)
    anyway = {j for at, j in result.extra.get(BY_CONSTRUCTION, ()) if at == i}
    try:
        recovery, (low, high) = result.recovery(), result.interval()
    except MetricError:  # no pair that both runs answer, or no gap: the patch's own findings say which
        return {**out, "sufficient": "can't tell"}
    cells = [j for j in range(len(result.positions)) if j not in anyway]
    if not cells:
        return {**out, "sufficient": "can't tell"}
    j = max(cells, key=lambda j: recovery[i, j].item())
    found = [x[i, j].item() for x in (recovery, low, high)]
    return {
        "sufficient": _answer(found[1], found[2], HALF), "recovery": found[0], "recovery_lo": found[1],
        "recovery_hi": found[2], "recovery_pos": result.positions[j],
    }  # fmt: skip


def interchanged(rows: Sequence[Mapping[str, Any]], site: str, readable: str) -> dict[str, Any]:
    """Whether the answer follows the class means of another run, where they are means of something that can be read.

    Where the label can't be read, its class means differ by what goes with it, such as the token at the same position.
    """
    here = {row["condition"]: row for row in rows if row["site"] == site}
    out: dict[str, Any] = dict.fromkeys(("used", "iia", "iia_lo", "iia_hi", "iia_complement", "interchange"))
    if "target" not in here:
        return out
    target, word = here["target"], here["target"]["verdict"]
    out.update({k: target[k] for k in ("iia", "iia_lo", "iia_hi")})
    out.update(interchange=word, iia_complement=here["complement"]["iia"])
    no = ("used elsewhere", "not here", "illusory", "unread")
    yes = word == "used" and readable == "yes"
    return {**out, "used": "yes" if yes else "no" if word in no else "can't tell"}
