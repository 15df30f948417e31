# ruff: noqa: RUF001 - × is meant
"""The command line of the benchmarks."""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from pathlib import Path

# One thread unless told otherwise, before torch and BLAS look: contenders then differ by work, not by threads.
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(variable, "1")
if __package__ in (None, ""):
    # As `python tests/benchmarks`
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def main() -> int:
    """Run rows, write the JSON file, show the table. 1 if results differ."""
    from benchmarks import growth, mamba, probing, running, sweeps
    from benchmarks.harness import SIZES, measure
    from benchmarks.table import markdown

    cases = {c.name: c for c in (*sweeps.CASES, *probing.CASES, *mamba.CASES, *running.CASES)}
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="full", help="shapes of the work")
    parser.add_argument("--quick", action="store_true", help="the same as --size quick")
    parser.add_argument("--only", nargs="*", choices=list(cases), default=list(cases), help="rows to run")
    parser.add_argument("--repeats", type=int, default=5, help="timed runs of each contender")
    parser.add_argument("--device", default="cpu", help="where the models run")
    parser.add_argument(
        "--out", type=Path, default=Path("benchmarks.json"), help="results, added to what is there"
    )
    parser.add_argument("--page", type=Path, help="write the page of the docs from all results in --out")
    parser.add_argument("--growth", action="store_true", help="run the growth curves instead of rows")
    parser.add_argument("--list", action="store_true", help="name the rows")
    args = parser.parse_args()
    if args.list:
        print("\n".join(f"{c.name}: {c.what}" for c in cases.values()))
        return 0
    warnings.simplefilter("ignore")
    store = json.loads(args.out.read_text()) if args.out.exists() else {"rows": [], "growth": []}
    if args.growth:
        store["growth"] = growth.curves()
        growth.plot(store["growth"], args.out.with_suffix(".html"))
        args.only = []
    for name in args.only:
        row = measure(cases[name], "quick" if args.quick else args.size, args.repeats, args.device)
        same = [r for r in store["rows"] if (r["case"], r["device"]) != (name, args.device)]
        store["rows"] = sorted([*same, row], key=lambda r: list(cases).index(r["case"]))
        args.out.write_text(json.dumps(store, indent=1))
        ratios = ", ".join(f"{k} {v:.2f}×" for k, v in row["ratios"].items())
        print(
            f"{name}: {ratios}; {'equal' if row['equal'] else 'RESULTS DIFFER'} {row['differences']} {row['facts']}",
            flush=True,
        )
    args.out.write_text(json.dumps(store, indent=1))
    page = markdown(store["rows"], store.get("growth"))
    if args.page:
        args.page.write_text(page)
    elif args.only:
        print("\n" + page.split("\n## ", 1)[-1])
    return 0 if all(r["equal"] for r in store["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
