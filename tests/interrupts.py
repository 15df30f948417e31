"""Ends ``probelens run`` at random moments, again and again, and looks whether the rows are all there at the end.

    python tests/interrupts.py            20 interrupts of quickstart's smoke preset, SIGINT and SIGTERM in turn

Each run goes on in the folder of the one before; one that gets to its end is followed by one in a new folder. At
the end the rows must equal those of a run that nobody interrupted. Takes minutes, so the suite has shorter ones.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pandas as pd


def command(recipe: str, preset: str, out: Path) -> list[str]:
    return [sys.executable, "-m", "probelens.cli", "run", recipe, "--preset", preset, "--out", str(out)]


def interrupted(words: list[str], after: float, sent: signal.Signals, group: bool) -> tuple[int, str]:
    """The exit status and what was said."""
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        process.wait(after)
    except subprocess.TimeoutExpired:
        (os.killpg if group else os.kill)(process.pid, sent)
    _, said = process.communicate(timeout=300)
    return process.returncode, said


def rows(folder: Path) -> pd.DataFrame:
    table = pd.read_parquet(folder / "rows.parquet")
    timed = [c for c in table.columns if "second" in c or c == "cell"]
    table = table.drop(columns=timed)
    return table.sort_values(list(table.columns), key=lambda c: c.astype(str)).reset_index(drop=True)


def main() -> int:
    """Run it; 0 if nothing went wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("times", nargs="?", type=int, default=20)
    parser.add_argument("--recipe", default="quickstart")
    parser.add_argument("--preset", default="smoke")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng, base = random.Random(args.seed), Path(tempfile.mkdtemp(prefix="interrupts-"))
    began = time.monotonic()
    subprocess.run(command(args.recipe, args.preset, base / "whole"), check=True, capture_output=True)
    whole, wanted, wrong, folder = time.monotonic() - began, rows(base / "whole"), 0, 0
    print(f"uninterrupted: {whole:.0f} s, {len(wanted)} rows", flush=True)
    for i in range(args.times):
        sent = (signal.SIGINT, signal.SIGTERM)[i % 2]
        after, group = rng.uniform(0.2, 0.7 * whole), rng.random() < 0.5
        status, said = interrupted(command(args.recipe, args.preset, base / str(folder)), after, sent, group)
        expected = {signal.SIGINT: (130, -signal.SIGINT), signal.SIGTERM: (143, -signal.SIGTERM)}[sent]
        # Before the command line is up, Python's own handlers end it.
        early = status in (-signal.SIGINT, -signal.SIGTERM) or (status == 1 and "KeyboardInterrupt" in said)
        problems = [
            what
            for what, bad in {
                f"status {status}": status not in (0, *expected) and not early,
                "a traceback": "Traceback" in said and not early,
                "leaked semaphores": "leaked" in said,
                "a half file": status == 130 and any((base / str(folder)).rglob("*.part")),
            }.items()
            if bad
        ]
        where = "the group" if group else "the parent"
        print(
            f"{i + 1}: {sent.name} to {where} after {after:.1f} s: {status}{' early' if early else ''} {problems or ''}",
            flush=True,
        )
        if problems:
            wrong += 1
            print(said, flush=True)
        if status == 0:
            wrong += not rows(base / str(folder)).equals(wanted)
            folder += 1
    for n in range(folder + 1):
        subprocess.run(command(args.recipe, args.preset, base / str(n)), check=True, capture_output=True)
        same = rows(base / str(n)).equals(wanted)
        print(f"folder {n}: {'the same rows' if same else 'OTHER ROWS'}", flush=True)
        wrong += not same
    print(f"{args.times} interrupts, {wrong} wrong")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
