"""Writes docs/simulations.md, how often intervals, tests and verdicts are wrong: ``python docs/tools/simulations.py``.

Each line of the page's table is a check of ``simulated``: a small experiment whose truth is known, run many times. What is
done is kept in docs/data/simulations.json, so that a stopped run goes on; a check starts anew when the code that it tries
has changed. ``--quick`` makes few runs of each and writes nothing, ``--page`` writes the page from what is kept.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import time
from pathlib import Path
from typing import Any

import simulated
import torch
from simulated import CHECKS, EFFECT, ERASED, NEEDED, PROBE, SWEEP, USED, Check

import probelens as pl
from probelens.examples import planted
from probelens.numerics.shares import exact_interval

DOCS = Path(__file__).resolve().parents[1]
PAGE, DATA = DOCS / "simulations.md", DOCS / "data" / "simulations.json"
QUICK, SAVED_EVERY, PARTS = 4, 5.0, 10  # runs of a check, seconds, and rounds


@functools.cache
def code(rooms: tuple[str, ...]) -> str:
    """A digest of the code of these rooms, and of the experiments."""
    package = Path(pl.__file__).parent
    files = sorted(path for room in rooms for path in (package / room).rglob("*.py"))
    found = hashlib.blake2b(digest_size=8)
    for path in (Path(simulated.__file__), Path(planted.__file__), *files):
        found.update(path.read_bytes())
    return found.hexdigest()


def measure(checks: tuple[Check, ...], most: int | None, kept: Path | None) -> dict[str, dict[str, Any]]:
    """Runs, hits and seconds of each check; those kept are gone on with."""
    there: dict[str, Any] = json.loads(kept.read_text())["checks"] if kept is not None and kept.exists() else {}
    done = {c.key: there[c.key] for c in checks if there.get(c.key, {}).get("code") == code(c.rooms)}
    last = time.monotonic()

    def save() -> None:
        if kept is not None:
            partial = kept.with_suffix(".partial")
            partial.write_text(json.dumps({"checks": done}, indent=1) + "\n")
            partial.replace(kept)

    # Every check gets its share of a part of the time, so that a stopped run has something of each.
    for part in range(1, PARTS + 1):
        for check in checks:
            row = done.setdefault(check.key, {"code": code(check.rooms), "n": 0, "hits": 0, "seconds": 0.0})
            while row["n"] < (check.n * part // PARTS if most is None else most):
                start = time.process_time()
                row["hits"] += check.run(row["n"])
                row["n"] += 1
                row["seconds"] = round(row["seconds"] + time.process_time() - start, 4)
                if time.monotonic() - last > SAVED_EVERY:
                    save()
                    last = time.monotonic()
        print(f"part {part} of {PARTS}", flush=True)
    save()
    return done


def said(check: Check, row: dict[str, Any]) -> str:
    """One line of the table."""
    least, most = check.aim
    low, high = exact_interval(row["hits"], row["n"])
    if least == 0:
        aim = f"at most {most:.0%}"
    else:
        aim = f"at least {least:.0%}" if most == 1 else f"{100 * least:g} to {most:.0%}"
    met = "yes" if least <= low and high <= most else "no" if high < least or low > most else "open"
    share = row["hits"] / row["n"]
    return f"| {check.what} | {aim} | {share:.1%} [{100 * low:.1f}, {100 * high:.1f}] | {row['n']:,} | {met} |"


HEAD = """# How often the statistics are wrong

<!-- Written by docs/tools/simulations.py. -->

An interval of 95 % promises to hold the truth in 95 of 100 cases, an adjusted p of 0.05 to be wrong in 5. Below, both are
tried on small experiments whose truth is known, each run many times with new random numbers. Brackets have the exact 95 %
interval of a share (Clopper and Pearson). An aim is met ("yes") or missed ("no") where the whole bracket says so, and "open"
otherwise: more runs would tell.
"""

ABOUT = {
    EFFECT: """\
The effect of an ablation is what a target costs beyond one more draw of its control. A random subspace is such a draw, so its
effect is 0, and the interval should hold 0 in 95 of 100 cases. The first lines use costs made by hand (60 sequences), the
others `pl.ablate` on two [planted models](fooled.md), on 100 random sequences: in `unused` the answer is read along one
direction, in `crowded` along all. The truth of a target that is read is its cost on all sequences that were held out, less
that of one more random direction there.""",
    SWEEP: """\
Thirteen sites that aren't used, each beside the draws of its control; neighbouring sites resemble each other, as layers do.
Without an adjustment about half of such sweeps have a site with p of at most 0.05.""",
    NEEDED: """\
How often `pl.ablate` says "yes" in its column `needed`. First over 13 sites of a model that reads one of 64 answers off all
directions after twelve blocks, each of which turns its stream a little: at random directions, another one at each site, and at
those of a label that tokens have by chance, with 20 sequences, 99 matched draws and p adjusted by max-T. Then `pl.erase` of a
label that the model doesn't use, but that equals the one that it uses at 90 % of the positions, without `given=` and with it,
with 400 sequences.""",
    ERASED: """\
The activations keep a binary label as the product of three signs along three directions. No linear probe reads that, and an MLP
does given enough sequences. Too few must end as "underpowered", which counts as right here; what counts is how often the check
of refitted probes finds nothing and claims that it would have. Below, the residue stands beside noise of eight directions, and
its size is that of each sign in standard deviations of the noise; sequences have four positions. The check of power plants one of
1.4, so "erased" says nothing of smaller ones. The last lines erase a label by `pl.erase` from a model whose stream of sixteen
directions holds it along one direction and once more as such a product, on sequences of twelve positions; there a size is given in
standard deviations of a feature with the residue in it.""",
    USED: """\
`pl.interchange` with its usual controls on up to 150 pairs of runs that differ in every variable: of a variable's direction
that the model doesn't read, and of random subspaces.""",
    PROBE: """\
`pl.probe` on 300 sequences of five positions, 60 of them for the test; the truth is the fitted probe's accuracy on 4,000 new
sequences. These intervals are exact ones of an effective number of trials, and rather too wide than too narrow.""",
}


def page(done: dict[str, dict[str, Any]]) -> str:
    """The page."""
    parts = [HEAD]
    for group in dict.fromkeys(check.group for check in CHECKS):
        lines = [said(check, done[check.key]) for check in CHECKS if check.group == group]
        table = "\n".join(["| on | aim | measured | runs | met |", "|---|---|---|--:|---|", *lines])
        parts.append(f"## {group}\n\n{ABOUT[group]}\n\n{table}\n")
    seconds = sum(row["seconds"] for row in done.values())
    parts.append(
        f"Command: `python docs/tools/simulations.py`. These runs took {max(1, round(seconds / 60))} minutes of one core; a run that is "
        "stopped goes on where it was. `--quick` tries everything in a few runs.\n"
    )
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument("--quick", action="store_true", help="few runs of each check, and no page")
    parser.add_argument("--page", action="store_true", help="no runs: write the page from what is kept")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.page:
        done = json.loads(DATA.read_text())["checks"]
    else:
        done = measure(CHECKS, QUICK if args.quick else None, None if args.quick else DATA)
    done = {check.key: done[check.key] for check in CHECKS}
    if args.quick:
        print("\n".join(f"{key}: {row['hits']} of {row['n']}, {row['seconds']:.1f} s" for key, row in done.items()))
    else:
        PAGE.write_text(page(done), encoding="utf-8")


if __name__ == "__main__":
    main()
