"""Models whose workings are known, and what each method says of them: the page "Ways to be fooled by a probe".

    python -m probelens.examples.fooled

prints two tables: for each model, whether it uses a variable, what a usual method concludes, and what the methods of
this library conclude; and what every method concludes of every model. `--figures FOLDER` also writes a figure for each.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import probelens as pl
from probelens.ablation.components import ablate_component
from probelens.ablation.erase import erase
from probelens.examples.fooled_page import OPEN, UNUSED, USED, Bar, Case, grid, table, write_figures
from probelens.examples.planted import (
    LENGTH,
    NEURONS,
    POST,
    SITE,
    World,
    correlated,
    crowded,
    exclusive,
    flipping,
    held_back,
    illusory,
    spare,
    twice,
    unused,
)
from probelens.probing import split_by_group
from probelens.probing.refit import position_probes

usual, here = functools.partial(Bar, "usual"), functools.partial(Bar, "here")
BITS = {"y": 1, "a": 1, "z": 2, "b": 2}  # of a token's id
BATCH = 1024  # these models are tiny: larger batches take less time


@dataclasses.dataclass(frozen=True)
class Measured:
    """What every method measures of one variable after the first block: rows of targets, and IIA by condition."""

    probes: pl.ProbeResult
    filter: dict[str, Any]
    means: dict[str, Any]
    erased: dict[str, Any]
    swap: dict[str, Any]
    iia: dict[str, float]

    @property
    def verdicts(self) -> dict[str, str]:
        """What each method concludes."""
        probe = self.probes.rows[0]
        return {
            "a probe reads it": by_probe(probe["accuracy"], probe["majority"]),
            "probe's rows removed": by_drop(self.filter["drop"]),
            "class means removed": judge(self.means),
            "erased by LEACE": judge(self.erased),
            "class means swapped": judge_swap(self.swap),
        }


def measure(made: World, label: str, target: str = "y", other: Callable[[Tensor], Tensor] | None = None) -> Measured:
    """Every method on one variable. ``other`` makes the token whose answer differs; by default y is flipped."""
    probes = pl.probe({SITE: made.acts(made.fit)}, {label: made.fit.labels[label]}, made.fit.groups)
    cut = {
        name: pl.ablate(
            made.model,
            made.held,
            probes,
            label=label,
            target=target,
            directions=name,
            mlp=name != "filter",
            batch_size=BATCH,
        ).targets()[0]
        for name in ("filter", "class_means")
    }
    pairs = made.pairs(other or (lambda tokens: tokens ^ BITS["y"]))
    swap, iia = swapped(made.model, pairs, probes)
    return Measured(probes, cut["filter"], cut["class_means"], erased(made, label, target), swap, iia)


def erased(made: World, label: str, target: str, given: str | None = None) -> dict[str, Any]:
    """The target's row of an erasure by LEACE."""
    return erase(
        made.model, made.fit, made.held, label=label, target=target, given=given, sites=SITE, batch_size=BATCH
    ).rows[0]


def swapped(
    model: pl.HookedModel, pairs: pl.PatchPairs, subspaces: Any, site: str = SITE, pos: int | None = None
) -> tuple[dict[str, Any], dict[str, float]]:
    """An interchange where the pairs are read: the target's row, and the mean IIA by condition."""
    found = pl.interchange(
        model, pairs, subspaces, site, pos=int(pairs.read_pos[0]) if pos is None else pos, batch_size=BATCH
    )
    by_condition: dict[str, list[float]] = {}
    for row in found.rows:
        by_condition.setdefault(row["condition"], []).append(row["iia"])
    return found.targets()[0], {name: sum(values) / len(values) for name, values in by_condition.items()}


def by_probe(accuracy: float, baseline: float) -> str:
    """The usual conclusion from a probe: readable, so used."""
    return USED if accuracy > baseline + 0.02 else UNUSED


def by_drop(drop: float) -> str:
    """The usual conclusion from an ablation: it costs something, so used."""
    return USED if drop > 0.02 else UNUSED


def by_swap(iia: float) -> str:
    """The usual conclusion from a swapped subspace: the answer follows, so it is used there."""
    return USED if iia > 0.5 else UNUSED


def judge(row: Mapping[str, Any]) -> str:
    """The conclusion from an ablation with its refit and controls: whether the model needs what was removed."""
    return {"yes": USED, "no": UNUSED}.get(row["needed"], OPEN)


def judge_swap(row: Mapping[str, Any]) -> str:
    """The conclusion from an interchange: used if the answer follows the subspace and nothing else, otherwise open."""
    return USED if row["verdict"] == "used" else OPEN


def _ablated(row: Mapping[str, Any]) -> str:
    return (
        f"drop {row['drop']:.2f} (random subspaces {_matched(row):.2f}), "
        f"refitted probes read {_refit(row):.2f} (guess {row['baseline']:.2f})"
    )


def _interchanged(row: Mapping[str, Any], iia: Mapping[str, float]) -> str:
    return (
        f"the answer follows in {row['iia']:.2f} of pairs (everything else swapped {iia['complement']:.2f}, "
        f"random {iia['random']:.2f})"
    )


def _refit(row: Mapping[str, Any]) -> float:
    """Accuracy of the best refitted probe."""
    read = (row["refit_accuracy"], row.get("refit_mlp_accuracy"), row["refit_position_accuracy"])
    return max(accuracy for accuracy in read if accuracy is not None)


def _matched(row: Mapping[str, Any]) -> float:
    """Mean drop of random subspaces that remove as much variance, or of equal rank where there are none such."""
    damage = row["damage_random_matched"]
    return float((row["damage_random"] if damage is None else damage) * (row["clean"] - row["chance"]))


def _numbers(row: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    found = {**row, "matched_drop": _matched(row), "refit": _refit(row)}
    return {f"{prefix}{key}": float(value) for key, value in found.items() if isinstance(value, int | float)}


def case_unused() -> Case:
    made = unused()
    found, other = measure(made, "z"), erased(made, "y", "y")
    probe, row = found.probes.rows[0], found.erased
    steps = ((f"LEACE of z: {_ablated(row)}", judge(row)),)
    numbers = {"probe": probe["accuracy"], "guess": probe["majority"], **_numbers(row), **_numbers(other, "y_")}
    naive = f"linear probe reads z: {probe['accuracy']:.2f} (guess {probe['majority']:.2f})"
    bars = (
        usual("a probe reads z", probe["accuracy"], probe["majority"]),
        here("answers lost without z", row["drop"]),
        here("… by variance-matched random subspaces", numbers["matched_drop"]),
        here("a refitted probe reads z", numbers["refit"], row["baseline"]),
        here("answers lost without y", other["drop"]),
    )
    says = by_probe(probe["accuracy"], probe["majority"])
    return Case("unused", "readable, not used", UNUSED, naive, says, steps, bars, numbers, found.verdicts)


def case_correlated() -> Case:
    made = correlated()
    found, given = measure(made, "z"), erased(made, "z", "y", given="y")
    row = found.erased
    naive = f"LEACE of z: {_ablated(row)}"
    steps = ((f"LEACE of z given y: {_ablated(given)}", judge(given)),)
    numbers = {"association": row["association"], **_numbers(row, "plain_"), **_numbers(given)}
    bars = (
        usual("answers lost without z", row["drop"]),
        usual("… by variance-matched random subspaces", numbers["plain_matched_drop"]),
        here("answers lost without z given y", given["drop"]),
        here("a refitted probe reads z given y", numbers["refit"], given["baseline"]),
    )
    title = "not used, but goes with one that is"
    verdicts = {**found.verdicts, "erased given y": judge(given)}
    return Case("correlated", title, UNUSED, naive, by_drop(row["drop"]), steps, bars, numbers, verdicts)


def case_twice() -> Case:
    made, parts = twice(), ["blocks.0.mixer.hook_out", "blocks.0.hook_mlp_out"]
    alone = ablate_component(made.model, made.held, parts, "mean", target="y").rows
    both = ablate_component(made.model, made.held, parts, "mean", joint=True, target="y").rows[0]
    found = measure(made, "y")
    row, drops = found.erased, [r["drop"] for r in alone]
    pairs, iia = made.pairs(lambda tokens: tokens ^ BITS["y"]), []
    for site in parts:
        probes = pl.probe(pl.collect(made.model, made.fit, site), {"y": made.fit.labels["y"]}, made.fit.groups)
        iia.append(swapped(made.model, pairs, probes, site)[0]["iia"])
    steps = (
        (f"both components to their means: drop {both['drop']:.2f}", by_drop(both["drop"])),
        (f"LEACE of y after both: {_ablated(row)}", judge(row)),
        (
            f"class means swapped in each alone: the answer follows in {iia[0]:.2f} and {iia[1]:.2f} of pairs; after both: "
            + _interchanged(found.swap, found.iia),
            judge_swap(found.swap),
        ),
    )
    numbers = {
        "mixer_drop": drops[0], "mlp_drop": drops[1], "joint_drop": both["drop"], "mixer_iia": iia[0], "mlp_iia": iia[1],
        "iia": found.swap["iia"], **_numbers(row),
    }  # fmt: skip
    naive = f"each component alone to its mean: drop {drops[0]:.2f} and {drops[1]:.2f}"
    bars = (
        usual("answers lost without the first component", drops[0]),
        usual("answers lost without the second component", drops[1]),
        here("answers lost without both", both["drop"]),
        here("answers lost without y, after both", row["drop"]),
        here("… by variance-matched random subspaces", numbers["matched_drop"]),
        here("the answer follows its class means, swapped", found.swap["iia"]),
    )
    says = by_drop(max(drops))
    return Case("twice", "kept twice", USED, naive, says, steps, bars, numbers, found.verdicts)


def case_exclusive() -> Case:
    made = exclusive()
    found = measure(made, "y")
    row = found.erased
    part = ablate_component(made.model, made.held, "blocks.0.mixer.hook_out", target="y").rows[0]
    naive = f"linear probe reads y: {row['probe_accuracy']:.2f} (guess {row['baseline']:.2f}); LEACE: drop {row['drop']:.2f}"
    steps = (
        (f"LEACE of y: {_ablated(row)}", judge(row)),
        (f"what writes it, resampled: drop {part['drop']:.2f}", by_drop(part["drop"])),
    )
    numbers = {"resampled_drop": part["drop"], **_numbers(row)}
    bars = (
        usual("a linear probe reads y", row["probe_accuracy"], row["baseline"]),
        usual("answers lost without what it reads", row["drop"]),
        here("a refitted MLP reads y", row["refit_mlp_accuracy"], row["baseline"]),
        here("answers lost without the writing component", part["drop"]),
    )
    says = by_probe(row["probe_accuracy"], row["baseline"])
    title = "in a code that no linear probe reads"
    return Case("exclusive", title, USED, naive, says, steps, bars, numbers, found.verdicts)


def case_flipping() -> Case:
    made = flipping()
    found = measure(made, "y")
    row = found.erased
    x, y, mask = made.acts(made.fit), made.fit.labels["y"], made.fit.mask
    by_position = position_probes(x, y, mask, split_by_group(made.fit.groups))
    # The direction in which the classes differ at each position, whatever its sign.
    steps_at = [x[:, t][y[:, t] == 1].mean(0) - x[:, t][y[:, t] == 0].mean(0) for t in range(x.shape[1])]
    line = pl.subspaces.from_probe(torch.stack(steps_at), x.mean((0, 1)), rank=1)
    cut = pl.ablate(made.model, made.held, {SITE: line}, label="y", batch_size=BATCH).targets()[0]
    swap, iia = swapped(made.model, made.pairs(lambda tokens: tokens ^ BITS["y"]), {SITE: line})
    naive = (
        f"linear probe over all positions reads y: {row['probe_accuracy']:.2f}, MLP {row['refit_mlp_accuracy']:.2f} "
        f"(guess {row['baseline']:.2f}); LEACE: drop {row['drop']:.2f}"
    )
    steps = (
        (f"LEACE of y: {_ablated(row)}", judge(row)),
        (f"the line along which positions differ: {_ablated(cut)}", judge(cut)),
        (f"the same line swapped: {_interchanged(swap, iia)}", judge_swap(swap)),
    )
    numbers = {"by_position": by_position.accuracy, "line_iia": swap["iia"], **_numbers(row), **_numbers(cut, "line_")}
    bars = (
        usual("a linear probe reads y", row["probe_accuracy"], row["baseline"]),
        usual("an MLP reads y", row["refit_mlp_accuracy"], row["baseline"]),
        usual("answers lost without what they read", row["drop"]),
        here("a probe at each position reads y", by_position.accuracy, row["position_baseline"]),
        here("answers lost without its direction", cut["drop"]),
        here("the answer follows its direction, swapped", swap["iia"]),
    )
    says = by_probe(row["probe_accuracy"], row["baseline"])
    title = "with a sign that changes with the position"
    return Case("flipping", title, USED, naive, says, steps, bars, numbers, found.verdicts)


def case_spare() -> Case:
    found = measure(spare(), "y")
    one, row = found.filter, found.means
    naive = f"the probe's direction removed: drop {one['drop']:.2f}"
    steps = (
        (f"the same, with its refit: {_ablated(one)}", judge(one)),
        (f"the direction between the class means: {_ablated(row)}", judge(row)),
        (f"the same swapped: {_interchanged(found.swap, found.iia)}", judge_swap(found.swap)),
    )
    numbers = {"iia": found.swap["iia"], **_numbers(one, "one_"), **_numbers(row), **_numbers(found.erased, "erased_")}
    bars = (
        usual("answers lost without the probe's direction", one["drop"]),
        here("variance along the probe's direction", one["variance"]),
        here("variance along the class means", row["variance"]),
        here("answers lost without the class means", row["drop"]),
        here("… by random subspaces", numbers["matched_drop"]),
        here("a refitted probe reads y then", numbers["refit"], row["baseline"]),
    )
    title = "read along a direction that carries nothing"
    return Case("spare", title, USED, naive, by_drop(one["drop"]), steps, bars, numbers, found.verdicts)


def case_crowded() -> Case:
    made = crowded()
    found = measure(made, "z", other=lambda tokens: (tokens + 7) % 512)
    row, probe = found.means, found.probes.rows[0]
    naive = f"the subspace of z removed: drop {row['drop']:.2f}"
    steps = (
        (f"the same, with its controls: {_ablated(row)}", judge(row)),
        (f"the same swapped: {_interchanged(found.swap, found.iia)}", judge_swap(found.swap)),
    )
    numbers = {"probe": probe["accuracy"], "iia": found.swap["iia"], **_numbers(row)}
    bars = (
        usual("a probe reads z", probe["accuracy"], row["majority"]),
        usual("answers lost without its subspace", row["drop"]),
        here("… by variance-matched random subspaces", numbers["matched_drop"]),
        here("a refitted MLP still reads z", row["refit_mlp_accuracy"], row["baseline"]),
        here("the answer follows its subspace, swapped", found.swap["iia"]),
    )
    title = "costly to remove, as is any subspace"
    return Case("crowded", title, UNUSED, naive, by_drop(row["drop"]), steps, bars, numbers, found.verdicts)


def case_held_back() -> Case:
    (made, pairs), t = held_back(), LENGTH // 2
    sites = ["blocks.0.hook_resid_post", "blocks.0.rnn.hook_c"]
    mask = torch.zeros_like(made.fit.mask)
    mask[:, t] = True
    acts = pl.collect(made.model, made.fit, sites)
    read = pl.probe(acts, {"y": made.fit.labels["y"]}, made.fit.groups, mask=mask)
    (output, guess), (cell, _) = ([read.row(site, "y")[k] for k in ("accuracy", "majority")] for site in sites)
    swaps = {site: swapped(made.model, pairs, read, site, t) for site in sites}
    row, iia = swaps[sites[1]]
    naive = f"linear probe reads y from the outputs at position {t}: {output:.2f} (guess {guess:.2f})"
    steps = (
        (f"a probe of the cell state at position {t} reads y: {cell:.2f}; its class means swapped there: "
         f"{_interchanged(row, iia)}", judge_swap(row)),
    )  # fmt: skip
    bars = (
        usual("a probe reads y from the outputs", output, guess),
        here("a probe reads y from the cell state", cell, guess),
        here("the answer follows its class means, swapped", row["iia"]),
        here("… everything but them", iia["complement"]),
        here("… random subspaces of the cell state", iia["random"]),
    )
    numbers = {"output": output, "cell": cell, "guess": guess, "iia": row["iia"], "complement": iia["complement"]}
    says = by_probe(output, guess)
    verdicts = {"a probe reads it": by_probe(cell, guess), "class means swapped": judge_swap(row)}
    return Case("held_back", "in a state that no output shows", USED, naive, says, steps, bars, numbers, verdicts)


def case_illusory() -> Case:
    model, pairs = illusory()
    mixed = torch.zeros(1, NEURONS)
    mixed[0, 1:3] = 0.5**0.5
    row, iia = swapped(model, pairs, {POST: pl.Subspace(mixed, torch.zeros(NEURONS))}, POST)
    naive = f"a direction of the MLP's neurons, swapped: the answer follows in {row['iia']:.2f} of pairs"
    says = UNUSED if row["verdict"] == "illusory" else judge_swap(row)
    steps = (
        (f"its part that the next weights read, swapped: {iia['row_space']:.2f}; the part that they don't: "
         f"{iia['null_space']:.2f}", says),
    )  # fmt: skip
    bars = (
        usual("the answer follows the direction", row["iia"]),
        usual("… everything but it", iia["complement"]),
        here("… its part that is read", iia["row_space"]),
        here("… its part that is not", iia["null_space"]),
    )
    numbers = {"iia": row["iia"], **{k: iia[k] for k in ("complement", "row_space", "null_space", "full")}}
    title = "a direction that works only by what is not read"
    verdicts = {"this direction swapped": says}
    return Case("illusory", title, UNUSED, naive, by_swap(row["iia"]), steps, bars, numbers, verdicts)


CASES = (
    case_unused, case_correlated, case_twice, case_exclusive, case_flipping, case_spare, case_crowded, case_held_back,
    case_illusory,
)  # fmt: skip


def main() -> None:
    """Measure every case and print the table."""
    parser = argparse.ArgumentParser(description="Ways to be fooled by a probe.")
    parser.add_argument("--figures", type=Path, default=None, help="folder to write an SVG of each case to")
    args = parser.parse_args()
    found = [make() for make in CASES]
    print(table(found), grid(found), sep="\n\n")
    if args.figures is not None:
        write_figures(found, args.figures)


if __name__ == "__main__":
    main()
