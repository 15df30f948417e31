"""What an installed probelens contains, and what importing it does and doesn't load."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import probelens
from probelens.hooks.adapter import Adapter

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PYPROJECT["tool"]["setuptools"]
FOLDERS = {"probelens": "probelens", "adapters": "probelens/adapters", "examples": "probelens/examples"}
HEAVY = ("transformers", "pandas", "sklearn", "plotly", "scipy", "pyarrow", "probelens.adapters", "probelens.examples")


def installed_path(path: Path) -> str:
    """Where a file of the source tree lies in an installation, as a posix path."""
    top, *rest = path.relative_to(ROOT).parts
    return "/".join([FOLDERS[top], *rest])


def sources() -> list[Path]:
    """Every Python file of the library, each once: the real folders, not the symlinks to them."""
    files = [p for top in FOLDERS for p in (ROOT / top).rglob("*.py")]
    return [p for p in files if p.resolve() == p and "__pycache__" not in p.parts]


def run_python(code: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=False)


def loaded_after(code: str) -> list[str]:
    done = run_python(f"{code}\nimport json, sys\nprint(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_import_probelens_loads_no_adapter_and_no_heavy_package() -> None:
    assert loaded_after("import probelens") == []


def test_the_list_of_heavy_packages_is_noticed_when_they_are_loaded() -> None:
    assert {"pandas", "probelens.adapters"} <= set(loaded_after("import pandas, probelens.adapters"))


def test_wrapping_loads_no_pandas_no_sklearn_and_no_plotly() -> None:
    found = loaded_after("import probelens as pl; pl.HookedModel, pl.wrap, pl.HookPoint, pl.ActivationCache")
    assert not {"pandas", "sklearn", "plotly", "scipy", "pyarrow", "transformers"} & set(found)


@pytest.mark.parametrize("name", probelens.__all__)
def test_every_public_name_resolves(name: str) -> None:
    value = getattr(probelens, name)
    assert value is getattr(probelens, name), "a second access gives another object"
    assert name in dir(probelens)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="No probelens attribute prob"):
        _ = probelens.prob  # type: ignore[attr-defined]


def test_a_public_module_is_there_without_an_import_of_its_own() -> None:
    code = "import probelens as pl; print(pl.stats.coverage.__name__, pl.kernels.rnn.rnn_forward.__name__)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["coverage", "rnn_forward"]


@pytest.mark.parametrize("name", ["ablation.ablate", "patching.patch", "probing.probe", "running.collect"])
def test_importing_the_module_of_the_same_name_leaves_the_function(name: str) -> None:
    function = name.rpartition(".")[2]
    done = run_python(
        f"import probelens as pl, probelens.{name}; print(type(pl.{function}).__name__, type(pl.{function}).__name__)"
    )
    assert done.stdout.split() == ["function", "function"], done.stderr


def test_the_folder_adapters_refuses_to_be_the_package_adapters() -> None:
    done = run_python("import adapters", cwd=ROOT)
    assert done.returncode != 0
    assert "ModuleNotFoundError" in done.stderr
    assert "probelens.adapters" in done.stderr


def test_the_same_folder_imports_as_probelens_adapters(tmp_path: Path) -> None:
    done = run_python("import probelens.adapters as a; print(a.__name__)", cwd=tmp_path)
    assert done.stdout.strip() == "probelens.adapters", done.stderr


def test_pyproject_lists_every_package_on_disk() -> None:
    on_disk = {installed_path(p.parent).replace("/", ".") for p in sources() if p.name == "__init__.py"}
    assert set(SETUPTOOLS["packages"]) == on_disk


def test_no_module_lies_outside_a_package() -> None:
    packages = {name.replace(".", "/") for name in SETUPTOOLS["packages"]}
    stray = [installed_path(p) for p in sources() if installed_path(p.parent) not in packages]
    assert not stray


def test_the_symlinks_lead_to_the_mapped_folders() -> None:
    for name in ("adapters", "examples"):
        link = ROOT / "probelens" / name
        if not link.is_symlink():  # a checkout without symlinks has a small text file in its place
            assert link.read_text().strip() == f"../{name}"
        else:
            assert link.resolve() == ROOT / name
        assert SETUPTOOLS["package-dir"][f"probelens.{name}"] == name


def test_every_adapter_is_declared_and_every_declared_one_exists() -> None:
    declared = set(PYPROJECT["project"]["entry-points"]["probelens.adapters"].values())
    found: dict[str, set[str]] = {}
    for path in (ROOT / "adapters").rglob("*.py"):
        parts = [p for p in path.relative_to(ROOT / "adapters").with_suffix("").parts if p != "__init__"]
        module = importlib.import_module(".".join(["probelens.adapters", *parts]))
        for cls in vars(module).values():
            if (
                isinstance(cls, type)
                and issubclass(cls, Adapter)
                and cls.__module__ == module.__name__
                and cls is not Adapter
            ):
                found.setdefault(cls.name, set()).add(f"{module.__name__}:{cls.__name__}")
    found.pop(Adapter.name, None)  # a base without a name of its own
    assert declared <= set().union(*found.values())
    assert [classes for classes in found.values() if not classes & declared] == []


def test_heavy_packages_are_imported_inside_functions() -> None:
    # Files that define scikit-learn estimators need their base class; they are loaded lazily themselves.
    estimators = {"probelens/probing/linear.py"}
    heavy = {"transformers", "pandas", "sklearn", "plotly", "scipy", "pyarrow"}
    found = []
    for path in sources():
        where = installed_path(path)
        if where in estimators or where.startswith(("probelens/adapters", "probelens/examples", "probelens/models")):
            continue
        for node in ast.parse(path.read_text()).body:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            found += [f"{where}: {n}" for n in names if n.partition(".")[0] in heavy]
    assert not found


def test_no_core_module_imports_an_adapter_while_it_is_imported() -> None:
    pattern = re.compile(r"^(from|import) +(probelens\.adapters|\.+adapters)\b", re.M)
    offenders = [
        installed_path(p) for p in sources() if p.is_relative_to(ROOT / "probelens") and pattern.search(p.read_text())
    ]
    assert not offenders


def test_constraints_pin_every_requirement_exactly() -> None:
    lines = [x for x in (ROOT / "constraints.txt").read_text().splitlines() if x and not x.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", x) for x in lines), "not one exact version a line"
    pinned = {x.partition("==")[0] for x in lines}
    project = PYPROJECT["project"]
    wanted = [
        *project["dependencies"],
        *(r for n, e in project["optional-dependencies"].items() if n != "mamba-ssm" for r in e),
    ]
    names = {re.match(r"[A-Za-z0-9_.-]+", r).group().lower().replace("_", "-") for r in wanted}  # type: ignore[union-attr]
    assert names - {"probelens"} <= pinned


def test_one_version_everywhere() -> None:
    cff = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.M)
    assert cff is not None
    assert cff.group(1).strip('"') == probelens.__version__
    assert f"[{probelens.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


README_COMMANDS = [
    "python3 -m venv .venv && .venv/bin/pip install -c constraints.txt -e . && .venv/bin/probelens run quickstart",
    'python3 -m venv .venv && .venv/bin/pip install -c constraints.txt -e ".[dev]" && .venv/bin/pytest',
]


def test_the_readme_has_the_two_commands() -> None:
    readme = (ROOT / "README.md").read_text()
    assert re.findall(r"^python3 -m venv .+$", readme, re.M) == README_COMMANDS


def test_ci_runs_the_commands_of_the_readme() -> None:
    """The lines of .ci/run that read the README, run by themselves."""
    ci = (ROOT / ".ci/run").read_text()
    (reading,) = re.findall(r"^readme=.+?^install=.+?$", ci, re.M | re.S)
    assert 'eval "$install"' in ci
    assert 'eval "$test"' in ci
    script = f'set -euo pipefail; venv=.venv\n{reading}\nprintf \'%s && %s\' "$install" "$test"'
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == README_COMMANDS[1]


@pytest.mark.slow
def test_wheel_holds_every_module_the_type_marker_and_the_page_of_reports(tmp_path: Path) -> None:
    """Built from a copy without symlinks, as a checkout on a system that has none would be."""
    copy = tmp_path / "src"
    for top in FOLDERS:
        shutil.copytree(ROOT / top, copy / top, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("adapters", "examples"):
        (copy / "probelens" / name).unlink()
        (copy / "probelens" / name).write_text(f"../{name}")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(copy)]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    inside = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    assets = {installed_path(p) for p in (ROOT / "probelens/results/report/assets").iterdir()}
    trained = {
        installed_path(p) for p in (ROOT / "examples/trained").iterdir() if p.suffix in (".json", ".safetensors")
    }
    assert {installed_path(p) for p in sources()} | {
        "probelens/py.typed",
        "probelens/__init__.pyi",
    } | assets | trained <= inside
    assert {n.partition("/")[0] for n in inside} == {"probelens"}
    assert wheel.stat().st_size < 8_000_000  # 6.6 MB of it are the quickstart's models


def test_installed_metadata_declares_the_adapters_and_the_command() -> None:
    entry_points = importlib.metadata.distribution("probelens").entry_points
    assert {e.name for e in entry_points.select(group="probelens.adapters")} >= {
        "hf-transformer",
        "hf-mamba",
        "torch-rnn",
        "generic",
    }
    assert [e.value for e in entry_points.select(group="console_scripts")] == ["probelens.cli.main:main"]
