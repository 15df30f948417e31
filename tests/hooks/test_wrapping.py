"""Adapters are found by entry point alone; a broken one hurts no other; unknown models get a way out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from torch import nn

import probelens as pl
from probelens.hooks import wrapping
from probelens.hooks.adapter import Adapter
from probelens.hooks.config import ModelConfig

GOOD = """
from torch import nn
from probelens.hooks.adapter import Adapter
from probelens.hooks.config import ModelConfig

class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.floors = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    def forward(self, x):
        for floor in self.floors:
            x = floor(x)
        return x

class TowerAdapter(Adapter):
    name = "tower"
    def __init__(self, module):
        super().__init__(module)
        self.blocks = [f"floors.{i}" for i in range(len(module.floors))]
        self.cfg = ModelConfig(n_layers=3, d_model=4, architecture=self.name)
    @classmethod
    def matches(cls, module):
        return isinstance(module, Tower)
"""
CHECK = """
import warnings, torch, probelens as pl, goodpack
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    model = pl.wrap(goodpack.Tower())
x = torch.randn(2, 5, 4)
out, cache = model.run_with_cache(x, "blocks.1.hook_resid_post")
assert model.cfg.architecture == "tower"
assert torch.equal(cache["resid_post", 1], model.module.floors[1](model.module.floors[0](x)))
assert any("broken" in str(w.message) and "ZeroDivisionError" in str(w.message) for w in seen), seen
print("ok")
"""


def install(folder: Path, package: str, code: str, entry: str) -> None:
    """What pip leaves of a package with one entry point."""
    (folder / package).mkdir()
    (folder / package / "__init__.py").write_text(code)
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[probelens.adapters]\n{entry}\n")


def test_adapters_of_other_packages_work_by_entry_point_and_a_broken_one_hurts_no_other(tmp_path: Path) -> None:
    install(tmp_path, "goodpack", GOOD, "tower = goodpack:TowerAdapter")
    install(tmp_path, "brokenpack", "1 / 0", "broken = brokenpack:Nothing")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{CHECK}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "ok"


BAD = """
from probelens.hooks.adapter import Adapter

class Bad(Adapter):
    name = "bad"
    priority = 99
"""
FAULTS = {
    "matches raises": BAD + "    matches = classmethod(lambda cls, module: {}['boom'])",
    "matches gives text": BAD + "    matches = classmethod(lambda cls, module: 'no')",
    "matches gives a tensor": "import torch\n" + BAD + "    matches = classmethod(lambda cls, module: torch.zeros(3))",
    "adapt gives a number": BAD
    + "    matches = classmethod(lambda cls, module: True)\n    adapt = classmethod(lambda cls, module, **o: 42)",
    "exits on import": "import sys\nsys.exit(3)",
    "priority is text": BAD.replace("99", "'high'"),
    "options are none": BAD + "    options = None",
    "no class": "Bad = 5",
    "no Python": "def (",
}
INTERRUPTED = "raise KeyboardInterrupt"


# One process that has imported everything, and a fork of it for each fault.
FORKS = """
import os, sys, traceback, warnings
from importlib.metadata import entry_points
import zoo, probelens as pl
module = zoo.build("neox")
for entry in entry_points(group="probelens.adapters"):
    entry.load()
for folder in sys.argv[1:]:
    sys.stdout.flush()
    if os.fork():
        os.wait()
        continue
    try:
        sys.path.insert(0, folder)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            layers = pl.wrap(module).cfg.n_layers
        said = sorted(str(w.message) for w in seen if "adapter 'bad' can't be used" in str(w.message))
        print(layers, bool(said), flush=True)
    except BaseException:
        print(" ".join(traceback.format_exc().split()), flush=True)
    os._exit(0)
"""


@pytest.fixture(scope="module")
def wrapped_beside(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Per fault: the number of layers of the model that was wrapped, and whether the adapter was named in a warning."""
    folders = []
    faults = {**FAULTS, "interrupts": INTERRUPTED}
    for fault, code in faults.items():
        folders.append(tmp_path_factory.mktemp(fault.replace(" ", "_")))
        install(folders[-1], "badpack", code, "bad = badpack:Bad")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(zoo.__file__).parent), *filter(None, sys.path)])}
    done = subprocess.run(
        [sys.executable, "-c", FORKS, *map(str, folders)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env=env,
    )
    lines = done.stdout.splitlines()
    assert len(lines) == len(faults), done.stdout + done.stderr
    return dict(zip(faults, lines, strict=True))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_foreign_adapter_that_misbehaves_is_named_and_passed_over(fault: str, wrapped_beside: dict[str, str]) -> None:
    assert wrapped_beside[fault] == "3 True"


def test_an_interrupt_on_import_ends_the_run_and_names_the_adapter(wrapped_beside: dict[str, str]) -> None:
    said = wrapped_beside["interrupts"]
    assert "KeyboardInterrupt" in said
    assert "the probelens adapter 'bad' was imported, from 'badpack:Bad'" in said


def test_every_built_in_adapter_imports_and_none_imports_its_backend() -> None:
    code = (
        "import sys; from probelens.hooks.wrapping import adapters; found = adapters(); "
        "heavy = {'transformers', 'transformer_lens', 'nnsight', 'mamba_ssm'} & set(sys.modules); "
        "print(sorted(found), sorted(heavy))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    names = set(wrapping.adapters())
    assert {"hf-transformer", "hf-mamba", "hf-mamba2", "torch-rnn", "generic"} <= names
    assert done.stdout.strip() == f"{sorted(names)} []"


@pytest.mark.parametrize(
    ("name", "adapter"),
    [
        ("neox", "hf-transformer"), ("gpt2", "hf-transformer"), ("llama", "hf-transformer"),
        ("mamba", "hf-mamba"), ("mamba2", "hf-mamba2"), ("lstm", "torch-rnn"), ("gru-bidirectional-fused", "torch-rnn"),
    ],
)  # fmt: skip
def test_each_family_finds_its_adapter(name: str, adapter: str) -> None:
    raw = zoo.build(name)
    model = pl.wrap(raw)
    assert model.adapter.name == adapter
    assert model.module is raw
    assert pl.wrap(model) is model
    assert pl.wrap(raw, adapter).adapter.name == adapter


class Step(nn.Module):
    """One block of somebody's own model."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x).tanh()


class Tagger(nn.Module):
    """Somebody's own model: nothing here is known to any adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 6)
        self.steps = nn.ModuleList(Step() for _ in range(2))
        self.last = nn.LayerNorm(6)
        self.out = nn.Linear(6, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for step in self.steps:
            x = step(x)
        return self.out(self.last(x))


def test_any_module_works_once_its_blocks_are_named() -> None:
    raw = Tagger()
    with pytest.raises(pl.AdapterNotFoundError, match="blocks="):
        pl.wrap(raw)
    model = pl.wrap(raw, blocks="steps", embed="table", ln_final="last", unembed="out")
    x = torch.randint(9, (2, 5))
    assert torch.equal(model(x), raw(x))
    _, cache = model.run_with_cache(x)
    assert list(cache)[:3] == ["hook_embed", "blocks.0.hook_resid_pre", "blocks.0.hook_resid_post"]
    assert torch.equal(cache["resid_post", 1], raw.steps[1](cache["resid_pre", 1]))
    assert model.cfg.d_vocab == 9
    with pytest.raises(pl.InputError, match="0 to 8"):
        model(torch.tensor([[9]]))
    assert model.verify(x).ok


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"blocks": "stepz"}, "Nearest: .*steps"),
        ({"blocks": "table"}, "no submodules"),
        ({"blocks": "steps", "unembed": "nope"}, "unembed='nope'"),
        ({"blokcs": "steps"}, "blokcs"),
        ({"embed": "table", "adapter": "generic"}, "needs to know where the blocks"),
    ],
)
def test_wrong_options_are_refused_by_name(options: dict[str, str], text: str) -> None:
    with pytest.raises(pl.InputError, match=text):
        pl.wrap(Tagger(), **options)


class Steps(Adapter):
    """An adapter that isn't installed."""

    name = "steps"

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.blocks = ["steps.0", "steps.1"]
        self.cfg = ModelConfig(n_layers=2, d_model=6, architecture=self.name)


class OldSteps(Steps):
    """One written when adapters made the hooked model themselves."""

    @classmethod
    def wrap(cls, module: nn.Module, **options: object) -> pl.HookedModel:
        return pl.HookedModel(module, cls(module, **options))


def test_an_adapter_class_is_used_as_given_and_its_own_wrap_still_counts() -> None:
    raw = Tagger()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = pl.wrap(raw, Steps)
    assert isinstance(model.adapter, Steps)
    assert model.module is raw
    with pytest.warns(DeprecationWarning, match=r"OldSteps\.adapt"):
        old = pl.wrap(raw, OldSteps)
    assert isinstance(old.adapter, OldSteps)
    x = torch.randint(9, (2, 5))
    assert torch.equal(old(x, stop_at_layer=1), model(x, stop_at_layer=1))
    with pytest.raises(pl.InputError, match="blocks"):
        pl.wrap(raw, Steps, blocks="steps")
    with pytest.raises(pl.AdapterNotFoundError, match=r"probelens\.Adapter"):
        pl.wrap(raw, Tagger)


def test_wrap_of_what_is_no_model_and_of_unknown_adapters() -> None:
    with pytest.raises(pl.AdapterNotFoundError, match="int"):
        pl.wrap(3)
    with pytest.raises(pl.AdapterNotFoundError, match="pl.load"):
        pl.wrap("gpt2")
    with pytest.raises(pl.AdapterNotFoundError, match="hf-mamba"):
        pl.wrap(zoo.build("mamba"), "hf-manba")


def test_load_reads_a_saved_model_and_its_tokenizer(tmp_path: Path) -> None:
    raw = zoo.build("neox")
    raw.save_pretrained(tmp_path / "model")
    model = pl.load(tmp_path / "model")
    x = zoo.tokens()
    assert model.tokenizer is None
    assert not model.module.training
    assert torch.equal(zoo.logits(model.module, x), zoo.logits(raw, x))
    half = pl.load(str(tmp_path / "model"), dtype=torch.bfloat16)
    assert half.cfg.dtype == torch.bfloat16


@pytest.mark.parametrize(("layers", "says"), [(2, "doesn't use"), (4, "no weights for")])
def test_a_checkpoint_that_does_not_fill_its_model_is_refused_unless_asked(
    tmp_path: Path, layers: int, says: str
) -> None:
    raw = zoo.build("neox")  # three layers
    raw.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}))
    with pytest.raises(pl.InputError, match=says):
        pl.load(tmp_path)
    assert pl.load(tmp_path, strict=False).cfg.n_layers == layers


@pytest.mark.parametrize("name", ["", "nobody/has-this-model", "/no/such/folder"])
def test_load_of_what_is_not_there_says_what_to_give(name: str) -> None:
    with pytest.raises(pl.InputError, match="hub"):
        pl.load(name)


def test_load_runs_no_code_from_a_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(
        '{"model_type": "evil", "auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}}'
    )
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').write('x')")
    with pytest.raises(pl.InputError):
        pl.load(folder)
    assert not (tmp_path / "ran").exists()


def _shorten(module: torch.nn.Module) -> None:
    del next(m for m in module.modules() if isinstance(m, torch.nn.ModuleList))[-1]


def _other_mlp(module: torch.nn.Module) -> None:
    module.set_submodule("gpt_neox.layers.2.mlp", torch.nn.Identity())


@pytest.mark.parametrize(
    ("family", "change"), [("neox", _shorten), ("neox", _other_mlp), ("mamba", _shorten), ("lstm", _shorten)]
)
def test_a_model_that_changed_after_it_was_wrapped_says_so_and_can_be_wrapped_again(family: str, change: Any) -> None:
    model, x = pl.wrap(zoo.build(family)), zoo.tokens()
    change(model.module)
    calls: dict[str, Any] = {
        "cache": lambda: model.run_with_cache(x), "hook": lambda: model.add_hook("*", lambda tensor, hook: None),
        "collect": lambda: pl.collect(model, x, None),
    }  # fmt: skip
    for call in calls.values():
        with pytest.raises(pl.InputError, match=r"has changed since it was wrapped: '.+2.*' is gone .*Wrap it again"):
            call()
    assert not model.has_hooks()
    assert any("is gone" in row["problem"] for row in model.verify(x).failures())
    again = pl.wrap(model.module)
    assert len(again.run_with_cache(x)[1]) == len(again.points.named)
