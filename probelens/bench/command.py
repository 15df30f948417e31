"""``probelens bench``: which rows run, where results go, and what is printed."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from probelens.errors import InputError, MissingDependencyError, StoreError, unknown

if TYPE_CHECKING:
    from probelens.bench.harness import Case

SHORT = "compare the speed of probelens with other tools on the same work"
LONG = (
    "Time probelens and its peers (TransformerLens, nnsight, scikit-learn, transformers, mambapy) on the same\n"
    "work, weights and inputs, in turn and on one thread, after comparing what they return. Times are medians of\n"
    "CPU seconds; 5.0x means that the peer takes five times as long. Peers that aren't installed are left out.\n"
    "Exit status 1 if results differ."
)
EXAMPLES = (
    "  probelens bench                                  small shapes: a few minutes\n"
    "  probelens bench --list                           the rows\n"
    "  probelens bench --only cache inlp                two of them\n"
    "  probelens bench --size medium --out b.json       real shapes where they fit into minutes, and kept\n"
    "  probelens bench --size full --out b.json         everything in full: hours on one core\n"
    "  probelens bench --growth --out b.json            how cost grows with size"
)
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Give the command its options."""
    parser.add_argument(
        "--size", choices=("quick", "medium", "full"), default="quick", help="shapes of the work (default quick)"
    )
    parser.add_argument("--quick", action="store_const", dest="size", const="quick", help="the same as --size quick")
    parser.add_argument("--only", nargs="+", metavar="ROW", help="rows to run; without it all of them")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="timed runs of each (default 5)")
    parser.add_argument("--device", default="cpu", help="where the models run; on cuda, wall time is measured")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON file; rows are added or replaced there")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the page of the docs from all of --out")
    parser.add_argument("--growth", action="store_true", help="run the growth curves instead of rows")
    parser.add_argument("--list", action="store_true", help="name the rows and what is missing for them")


def bench(args: argparse.Namespace) -> int:
    """Run the benchmarks, print the results and save them; 1 if the results of a row differ, otherwise 0."""
    if args.repeats < 1:
        raise InputError(f"--repeats {args.repeats}: at least 1 is needed")
    with _single_thread(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cases = _cases()
        for name in args.only or ():
            if name not in cases:
                raise InputError(unknown("row", name, cases))
        if args.list:
            return _list(list(cases.values()), args.json)
        _check_device(args.device)
        store = _read(args.out)
        done = _grow(args, store) if args.growth else _run(args, store, cases)
    if args.page:
        from probelens.bench.table import markdown

        _write(args.page, markdown(store["rows"], store["growth"], _picture(args.page, store["growth"])))
    return done


def _cases() -> dict[str, Case]:
    from probelens.bench.rows import CASES

    return {case.name: case for case in CASES}


def _list(cases: list[Case], as_json: bool) -> int:
    if as_json:
        print(json.dumps([{"name": c.name, "what": c.what, "left_out": c.missing()} for c in cases], indent=2))
        return 0
    for case in cases:
        print("\n  ".join([f"{case.name}: {case.what}", *case.missing()]))
    return 0


def _run(args: argparse.Namespace, store: dict[str, Any], cases: dict[str, Case]) -> int:
    from probelens.bench.harness import measure
    from probelens.bench.table import lines
    from probelens.results.progress import progress_bar

    names = [name for name in cases if args.only is None or name in args.only]
    left_out = [line for name in names for line in cases[name].missing()]
    if not any(cases[name].runs_here() for name in names):
        raise MissingDependencyError("; ".join(left_out))
    _note(left_out)
    rows, order = [], {name: i for i, name in enumerate(cases)}
    with progress_bar(len(names), "rows", not args.quiet) as bar:
        for name in names:
            bar.set_postfix_str(name)
            row = None
            if cases[name].runs_here():
                try:
                    row = measure(cases[name], args.size, args.repeats, args.device)
                except ImportError as err:  # a peer that is there, but too old or broken
                    left_out.append(f"{name} is left out: {err}")
                    _note(left_out[-1:])
            if row is not None:
                rows.append(row)
                with _shared(args.out, store):
                    same = [r for r in store["rows"] if (r["case"], r["device"]) != (name, args.device)]
                    store["rows"] = sorted([*same, row], key=lambda r: order.get(r["case"], len(order)))
                if not args.json:
                    bar.clear()
                    print(*lines(row), sep="\n", flush=True)
            bar.update(1)
    if args.json:
        print(json.dumps({"rows": rows, "left_out": left_out}, indent=2))
    return 0 if all(row["equal"] for row in rows) else 1


def _grow(args: argparse.Namespace, store: dict[str, Any]) -> int:
    from probelens.bench import growth
    from probelens.bench.table import growth_line
    from probelens.results.progress import progress_bar

    left_out = growth.missing()
    _note(left_out)
    found: list[dict[str, Any]] = []
    with progress_bar(len(growth.CURVES) - len(left_out), "curves", not args.quiet) as bar:
        for curve in growth.curves():
            found.append(curve)
            with _shared(args.out, store):
                store["growth"] = found
            if not args.json:
                bar.clear()
                print(growth_line(curve), flush=True)
            bar.update(1)
    if args.out:
        growth.plot(store["growth"], args.out.with_suffix(".html"))
    if args.json:
        print(json.dumps({"growth": store["growth"], "left_out": left_out}, indent=2))
    return 0


def _picture(page: Path, curves: list[dict[str, Any]]) -> str | None:
    """Draw the plot of growth beside a page, where kaleido and a Chrome are there for it."""
    from probelens.bench import growth

    if not curves:
        return None
    path = page.parent / "figures" / "benchmarks" / "growth.svg"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        growth.plot(curves, path)
    except Exception as err:  # of kaleido's making: a missing browser has an error of its own in each version
        kept = path.is_file()
        said = " ".join(str(err).split())[:200] or type(err).__name__
        _note([f"the page {'keeps the plot of growth that is there' if kept else 'has no plot of growth'}: {said}"])
        if not kept:
            return None
    return str(path.relative_to(page.parent))


def _note(lines: list[str]) -> None:
    for line in lines:
        print(f"probelens: {line}", file=sys.stderr)


@contextlib.contextmanager
def _single_thread() -> Iterator[None]:
    """Use one thread unless the environment says otherwise, before torch and BLAS read it: times then differ by work alone."""
    added = [name for name in THREADS if name not in os.environ]
    os.environ.update(dict.fromkeys(added, "1"))
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def _check_device(name: str) -> None:
    import torch

    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as err:
        raise InputError(f"--device {name!r} can't be used: {str(err).splitlines()[0]}") from err


def _read(path: Path | None) -> dict[str, Any]:
    if path is None or not path.exists():
        return {"rows": [], "growth": []}
    try:
        known = {"growth": [], **json.loads(path.read_text())}
        if all(row["case"] and row["device"] for row in known["rows"]):
            return known
        why = "a row has no name"
    except (OSError, ValueError, TypeError, KeyError) as err:
        why = f"{type(err).__name__}: {err}"
    raise StoreError(f"--out {str(path)!r} isn't a file of this command: {why}. Name another one")


@contextlib.contextmanager
def _shared(path: Path | None, store: dict[str, Any]) -> Iterator[None]:
    """Take over what another process has added to the file meanwhile, change the store in the block, and write it."""
    if path is not None and path.exists():
        with contextlib.suppress(StoreError):  # damaged meanwhile: what is in memory is the better copy
            store.update(_read(path))
    yield
    if path is not None:
        _write(path, json.dumps(store, indent=1))


def _write(path: Path, text: str) -> None:
    from probelens.results.files import atomic_path

    with atomic_path(path) as part:
        part.write_text(text)
