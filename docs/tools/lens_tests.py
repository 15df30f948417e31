"""Runs TransformerLens' own tests of hooks, caches and patching on wrapped models: ``python docs/tools/lens_tests.py``.

The tests come with TransformerLens' source distribution, of the version that is installed, which pip fetches; or
from a folder of it that is there, ``--source FOLDER``. Each runs twice, on its own bridges of tiny models and on the same models
wrapped (``lens_shim``). What passes on bridges is counted: passed, or by why it failed on a wrapped model.
"""

from __future__ import annotations

import argparse
import collections
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

FILES = (
    "unit/model_bridge/test_caching_hooks_aliases.py",
    "unit/model_bridge/test_caching_hooks_pos_slice_batch_dim.py",
    "unit/model_bridge/test_caching_remove_batch_dim.py",
    "unit/model_bridge/test_reset_hooks_registry.py",
    "unit/model_bridge/test_run_with_hooks_remove_batch_dim.py",
    "unit/model_bridge/test_bridge_cross_run_mlp_in_patching.py",
)
MORE = (
    "unit/test_patching.py",
    "unit/model_bridge/test_bridge_cross_run_qkv_patching.py",
    "unit/test_activation_cache.py",
    "unit/test_activation_cache_batch_dim.py",
    "integration/model_bridge/test_bridge_caching_hooks.py",
    "integration/model_bridge/test_bridge_hook_scope.py",
    "integration/model_bridge/test_bridge_run_with_cache_incl_bwd.py",
    "integration/model_bridge/test_bridge_run_with_cache_pos_slice.py",
    "integration/model_bridge/test_bridge_start_at_layer.py",
    "integration/model_bridge/test_bridge_stop_at_layer.py",
    "integration/model_bridge/compatibility/test_bridge_cache_behavior.py",
    "integration/model_bridge/compatibility/test_bridge_hook_behavior.py",
    "acceptance/test_activation_cache.py",
)
# Why a test fails on a wrapped model, by what its error says; the first that fits.
CHOICES = {
    "a batch that isn't of one example is an error of its own": r"remove_batch_dim needs a batch of 1",
    "weights in TransformerLens' layout": r"weights in TransformerLens' own layout|weights are not folded|no attribute 'W_",
    "inputs of single heads, made on request": r"heads have no inputs of their own|set_use_",
    "a hook that no run reaches is an error": r"HookNotFiredError",
    "errors in other words": r"Regex pattern did not match",
    "points go by their older names": r"hook_(in|out|resid_pre|resid_post)\b",
    "attributes of the bridge's inside": r"has no attribute|_hook_registry|get_hook_point",
}


def source(folder: Path) -> Path:
    """TransformerLens' source distribution, fetched into ``folder``."""
    version = importlib.metadata.version("transformer-lens")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", "transformer-lens"]
    subprocess.run([*command, f"transformer-lens=={version}", "-d", str(folder), "-q"], check=True)
    with tarfile.open(next(folder.glob("*.tar.gz"))) as packed:
        packed.extractall(folder, filter="data")
    return folder / f"transformer_lens-{version}"


def outcomes(root: Path, side: str, files: tuple[str, ...], results: Path) -> dict[str, list[str]]:
    """What becomes of each test on "bridge" or "wrapped": its outcome, and its error."""
    here = str(Path(__file__).resolve().parent)
    settings = {
        "LENS_SIDE": side,
        "LENS_RESULTS": str(results),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": f"{here}{os.pathsep}{root}",
    }
    options = ["-p", "lens_shim", "-p", "no:cacheprovider", "-q", "-c", os.devnull, "--rootdir", str(root)]
    command = [sys.executable, "-m", "pytest", *options, "--continue-on-collection-errors"]
    subprocess.run(
        [*command, *(f"tests/{name}" for name in files)], cwd=root, env={**os.environ, **settings}, check=False
    )
    found: dict[str, list[str]] = json.loads(results.read_text(encoding="utf-8"))
    return found


def counts(bridge: dict[str, list[str]], wrapped: dict[str, list[str]]) -> collections.Counter[str]:
    """How many tests that pass on bridges pass on wrapped models, and why the others don't."""
    found: collections.Counter[str] = collections.Counter()
    for name, (outcome, _) in bridge.items():
        if outcome == "passed":
            became, error = wrapped.get(name, ["not run", ""])
            why = next((choice for choice, sign in CHOICES.items() if re.search(sign, error)), "other")
            found["passes" if became == "passed" else why] += 1
    return found


def main() -> None:
    """The table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, help="TransformerLens' source distribution, unpacked")
    parser.add_argument("--more", action="store_true", help="also the files that take longer")
    parser.add_argument("--list", action="store_true", help="name each test that doesn't pass")
    args = parser.parse_args()
    files = FILES + MORE if args.more else FILES
    with tempfile.TemporaryDirectory() as folder:
        root = args.source or source(Path(folder))
        bridge, wrapped = (outcomes(root, side, files, Path(folder, f"{side}.json")) for side in ("bridge", "wrapped"))
    found = counts(bridge, wrapped)
    print(f"| {sum(found.values())} tests pass on bridges | on wrapped models |\n|---|---|")
    print("\n".join(f"| {what} | {n} |" for what, n in found.most_common()))
    if args.list:
        for name, (outcome, error) in wrapped.items():
            if outcome != "passed" and bridge.get(name, [""])[0] == "passed":
                print(name, error.splitlines()[0] if error else "", sep="\n    ")


if __name__ == "__main__":
    main()
