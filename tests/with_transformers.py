"""Runs the tests of adapters under another version of transformers: ``python tests/with_transformers.py 5.13.0``.

That version goes into a folder of its own in the tests' cache, with those of its requirements that the
installed packages don't meet, and stands first on the path of one pytest run. Further arguments go to
pytest; without any, the files in ``FILES`` run.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

from packaging.requirements import Requirement

HERE = Path(__file__).resolve().parent
FILES = (
    "test_conformance.py", "test_hybrids.py", "test_model.py", "test_verify.py", "test_registry.py",
    "test_mamba_ssm.py", "test_ssm.py",
)  # fmt: skip


def folder_for(version: str) -> Path:
    """The folder with this version, made if it isn't there whole."""
    cache = Path(os.environ.get("PROBELENS_TEST_CACHE") or Path.home() / ".cache" / "probelens-tests")
    folder = cache / f"transformers-{version}"
    done = folder / "complete"
    if not done.exists():
        folder.mkdir(parents=True, exist_ok=True)
        install(folder, f"transformers=={version}")
        for requirement in unmet(folder):
            install(folder, requirement)
        done.touch()
    return folder


def install(folder: Path, requirement: str) -> None:
    # A constraints file for the whole environment names another version.
    env = {k: v for k, v in os.environ.items() if k != "PIP_CONSTRAINT"}
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*command, "--upgrade", "--target", str(folder), requirement], check=True, env=env)


def unmet(folder: Path) -> list[str]:
    """What the version asks for and the installed packages don't give."""
    (found,) = importlib.metadata.distributions(name="transformers", path=[str(folder)])
    missing = []
    for line in found.requires or []:
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            version = ""
        if not version or not requirement.specifier.contains(version, prereleases=True):
            missing.append(f"{requirement.name}{requirement.specifier}")
    return missing


def main(version: str, *arguments: str) -> int:
    """Run pytest under ``version``; its exit status."""
    env = {**os.environ, "PYTHONPATH": str(folder_for(version))}
    code = "import transformers; print('transformers', transformers.__version__, transformers.__path__[0])"
    said = subprocess.run(
        [sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True
    ).stdout
    print(said.strip(), flush=True)
    if f"transformers {version} " not in said:
        raise SystemExit(f"asked for transformers {version}, got {said}")
    files = arguments or tuple(str(HERE / name) for name in FILES)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *files], env=env, check=False, cwd=HERE.parent
    ).returncode


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    sys.exit(main(*sys.argv[1:]))
