"""Runs tests under other versions of the requirements.

    python tests/with_versions.py lowest                  the lowest versions that pyproject.toml admits
    python tests/with_versions.py newest                  the newest ones
    python tests/with_versions.py transformers==5.13.0    one version, the rest as it is
    python tests/with_versions.py lowest --keep torch     all but these, which stay as they are

Each set goes into an environment of its own in the tests' cache. What isn't asked for and fits is lent by the
environment that runs this; pip decides what fits. Words after ``--`` go to pytest; without any, the files in ``FILES`` run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

from packaging.requirements import Requirement

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
FILES = (
    "adapters/test_conformance.py", "adapters/test_hybrids.py", "hooks/test_model.py", "hooks/test_verify.py", "hooks/test_wrapping.py",
    "adapters/test_mamba_ssm.py", "adapters/test_mixers_by_hand.py", "kernels/test_ssm.py",
)  # fmt: skip
# What stands on the other requirements: scikit-learn, pandas, plotly, pyarrow, safetensors, einops, tqdm, numpy.
MORE = (
    "models/test_models.py", "kernels/test_rnn.py", "models/test_training.py", "running/test_collect.py", "hooks/test_cache.py", "hooks/test_edits.py",
    "patching/test_patch.py", "ablation/test_ablate.py", "probing/test_linear.py", "probing/test_logistic.py",
    "probing/test_probe.py", "probing/test_mlp.py", "subspaces/test_subspaces.py", "numerics/test_stats.py", "results/test_plots.py",
    "results/test_report.py", "results/test_results.py", "experiments/test_experiments.py",
)  # fmt: skip
SAY = """
import importlib.metadata, json, sys
print(json.dumps({name: importlib.metadata.version(name) for name in sys.argv[1:]}))
"""


def requirements() -> dict[str, Requirement]:
    """What probelens itself requires, by name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {r.name: r for r in map(Requirement, project["dependencies"])}


def wanted(sets: list[str], keep: list[str]) -> list[str]:
    """What pip is to install."""
    known = requirements()
    for name in keep:
        if name not in known:
            raise SystemExit(f"--keep {name}: probelens requires {', '.join(known)}")
    if sets == ["newest"]:
        return [str(r) for name, r in known.items() if name not in keep]
    if sets == ["lowest"]:
        floors = {n: s.version for n, r in known.items() for s in r.specifier if s.operator == ">="}
        return [f"{name}=={version}" for name, version in floors.items() if name not in keep]
    return sets


def environment(sets: list[str], keep: list[str]) -> Path:
    """Python of an environment with these versions, made if it isn't there whole."""
    install = wanted(sets, keep)
    lent = sysconfig.get_path("purelib")
    mark = hashlib.sha256(json.dumps([install, lent, sys.version]).encode()).hexdigest()[:8]
    cache = Path(os.environ.get("PROBELENS_TEST_CACHE") or Path.home() / ".cache" / "probelens-tests")
    folder = cache / f"{'-'.join(sets)}-{mark}"
    python, done = folder / "bin" / "python", folder / "complete"
    # What is newest changes, and is asked again.
    if not done.exists() or sets == ["newest"]:
        venv.create(folder, with_pip=True)
        own = subprocess.run(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            check=True, capture_output=True, text=True,
        ).stdout.strip()  # fmt: skip
        # The .pth files of a folder named by a .pth file aren't read: an editable probelens stays out of reach.
        Path(own, "lent.pth").write_text(lent + "\n")
        # A constraints file for the whole environment names other versions.
        env = {k: v for k, v in os.environ.items() if k != "PIP_CONSTRAINT"}
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        if sets == ["newest"]:
            pip.append("--upgrade")
        subprocess.run([*pip, *install], check=True, env=env)
        done.touch()
    return python


def main() -> int:
    """Run pytest under other versions; its exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("sets", nargs="+", metavar="VERSIONS", help="lowest, newest, or NAME==VERSION")
    parser.add_argument("--keep", nargs="+", default=[], metavar="NAME", help="leave these as they are")
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    args = parser.parse_args(words[:cut])
    every = args.sets[0] in ("lowest", "newest")
    python = environment(args.sets, args.keep)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [python, "-c", SAY, *requirements()]
    found = json.loads(subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout)
    print(*(f"{name} {version}" for name, version in found.items()), sep=", ", flush=True)
    for requirement in map(Requirement, wanted(args.sets, args.keep)):
        if not requirement.specifier.contains(found[requirement.name], prereleases=True):
            raise SystemExit(f"asked for {requirement}, got {found[requirement.name]}")
    # Named files run in one process by default; these are many.
    workers = ["-n", str(min(os.cpu_count() or 1, 8)), "--dist", "load"]
    given = words[cut + 1 :] or [*workers, *(str(HERE / name) for name in (*FILES, *(MORE if every else ())))]
    return subprocess.run([python, "-m", "pytest", "-q", *given], env=env, check=False, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
