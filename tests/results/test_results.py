"""Results on disk: every kind comes back as it was, and no file can do more than be refused."""

from __future__ import annotations

import dataclasses
import errno
import importlib
import json
import math
import os
import pickle
import pkgutil
import sys
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import zoo
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

import probelens as pl
from probelens.hooks.verify import VerifyReport
from probelens.numerics.permutation import sign_flip
from probelens.numerics.stats import Interval, hierarchical_bootstrap
from probelens.results.files import atomic_path, read_rows, read_tensors, write_rows, write_tensors
from probelens.results.result import Result
from probelens.subspaces.leace import Eraser
from probelens.subspaces.oracle import oracle, quadratic

SHORT = pl.training.TrainConfig(
    steps=300, batch_size=32, lr=5e-3, warmup=10, decay_steps=20, length=10, eval_sequences=64, target_accuracy=None
)


class Made:
    """One real, small instance of each class of result; each is measured when first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.task = pl.tasks.Parity(bos=True)
        config = pl.models.FormalConfig.for_task("gru", self.task, n_layers=2, d_model=8, hidden_size=12)
        self.model = pl.wrap(pl.models.build(config))
        self.training = pl.training.train(self.model, self.task, config=SHORT, checkpoint_dir=folder, progress=False)
        options: dict[str, Any] = {"length": 10, "n_probe": 40, "n_ablate": 16, "n_pairs": 24, "controls": 2}
        self.profile = pl.profile(self.model, self.task, mlp=False, **options)
        self.batch = self.task.sample(12, length=10)
        self.acts = pl.collect(self.model, self.batch, "layers")

    def make(self, name: str) -> Result:
        return getattr(self, f"_{name}")()

    def _Activations(self) -> Result:
        return self.acts

    def _AblationResult(self) -> Result:
        return self.profile.ablations["state"]

    def _Eraser(self) -> Result:
        return pl.leace(self.acts[self.acts.names[-1]][self.batch.mask], self.batch.labels["state"][self.batch.mask])

    def _OracleEraser(self) -> Result:
        return oracle(self.acts[self.acts.names[-1]][self.batch.mask], self.batch.labels["state"][self.batch.mask])

    def _QuadraticEraser(self) -> Result:
        return quadratic(self.acts[self.acts.names[-1]][self.batch.mask], self.batch.labels["state"][self.batch.mask])

    def _ErasureResult(self) -> Result:
        from probelens.ablation.erase import erase

        parts = self.task.splits({"fit": 60, "held": 30}, length=10)
        site = ["blocks.1.hook_resid_post"]
        return erase(self.model, parts["fit"], parts["held"], label="state", sites=site, controls=2, mlp=False)

    def _EvalResult(self) -> Result:
        return pl.training.evaluate(self.model, self.task, (10, 14), n=8, trained_length=10)

    def _Inlp(self) -> Result:
        from probelens.subspaces.inlp import inlp

        x = self.acts[self.acts.names[-1]]
        groups = self.batch.groups[:, None].expand(x.shape[:2])
        return inlp(x, self.batch.labels["state"], groups, mask=self.batch.mask, max_rank=2)

    def _Interval(self) -> Result:
        return hierarchical_bootstrap(torch.rand(2, 6, generator=torch.Generator().manual_seed(0)), n_draws=50)

    def _PatchResult(self) -> Result:
        return self.profile.patches["state"]

    def _PatchSitesResult(self) -> Result:
        return pl.patch_sites(self.model, self.task.pairs(4, length=10), correct_only=False, n_boot=20)

    def _ProbeResult(self) -> Result:
        return self.profile.probes

    def _Profile(self) -> Result:
        return self.profile

    def _ProfileIndices(self) -> Result:
        return self.profile.indices["state"]

    def _SignFlip(self) -> Result:
        return sign_flip([0.3, 0.1, 0.2, 0.4])

    def _Subspace(self) -> Result:
        return pl.subspaces.pca(self.acts[self.acts.names[0]], 2)

    def _TrainResult(self) -> Result:
        return self.training

    def _TrainState(self) -> Result:
        from probelens.models.training_run import STATE_FILE, TrainState

        return TrainState.load(self.folder / STATE_FILE)

    def _VerifyReport(self) -> Result:
        return self.model.verify()


def subclasses(cls: type) -> Iterator[type]:
    for sub in cls.__subclasses__():
        yield sub
        yield from subclasses(sub)


def library_results() -> list[str]:
    for module in pkgutil.walk_packages(pl.__path__, "probelens."):
        if not module.name.startswith(("probelens.adapters", "probelens.examples")):
            importlib.import_module(module.name)
    found = (c for c in subclasses(Result) if c.__module__.startswith("probelens."))
    return sorted({c.__name__ for c in found if dataclasses.is_dataclass(c)})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("run"))


@dataclasses.dataclass(frozen=True, eq=False)
class Sample(Result):
    """A result with a field of every allowed kind."""

    number: float
    count: int
    flag: bool
    text: str
    tensor: Tensor
    named: dict[str, Tensor]
    nested: Interval | None
    rows: list[dict[str, Any]]
    pair: tuple[int, str]
    nothing: None = None


def same(a: Any, b: Any) -> bool:
    """Equal in value, type, dtype, shape and NaN."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.cpu().nan_to_num(), b.nan_to_num()) and (
            not a.is_floating_point() or torch.equal(a.cpu().isnan(), b.isnan())
        )  # fmt: skip
    if isinstance(a, Result):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))  # type: ignore[arg-type]
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


def plain(value: Any) -> Any:
    """What a file keeps of numpy scalars: Python's."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(plain, value))
    return value.item() if hasattr(value, "dtype") and not isinstance(value, Tensor) else value


def invented(hint: Any, made: Made) -> Any:
    """A value of a declared type."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(hint, type) and issubclass(hint, Result):
        return made.make(hint.__name__)
    if origin in (typing.Union, types.UnionType):
        return invented(inner[0], made)
    if origin is dict:
        return {"a\u2603": invented(inner[1], made), "b": invented(inner[1], made)}
    if origin is list:
        return [invented(inner[0], made) for _ in range(2)]
    if origin is tuple:
        return tuple(invented(h, made) for h in inner if h is not Ellipsis)
    if hint is Tensor:
        return torch.tensor([[1.5, float("nan")], [float("-inf"), -0.0]])
    plain = {int: -3, float: float("nan"), bool: True, str: "text\0", Any: [None, 1, {"x": (0.5, "y")}]}
    return plain[hint]


def test_every_other_class_of_result_comes_back_too(made: Made, tmp_path: Path) -> None:
    # Classes without an instance in Made get values of the types that their fields declare.
    others = [
        c for c in set(subclasses(Result)) if c.__name__ in library_results() and not hasattr(Made, f"_{c.__name__}")
    ]
    for cls in others:
        hints = typing.get_type_hints(cls)
        before = cls(**{f.name: invented(hints[f.name], made) for f in dataclasses.fields(cls)})  # type: ignore[arg-type]
        after = cls.load(before.save(tmp_path / cls.__name__))  # type: ignore[attr-defined]
        assert same(before, after), cls


@pytest.mark.parametrize("name", sorted(n[1:] for n in vars(Made) if n[1:2].isupper()))
def test_every_result_comes_back_as_it_was(made: Made, tmp_path: Path, name: str) -> None:
    if name not in library_results():
        pytest.skip(f"this version has no {name}")
    before = made.make(name)
    path = before.save(tmp_path / "deep" / "result.safetensors")
    after = type(before).load(path)
    for field in dataclasses.fields(before):  # type: ignore[arg-type]
        a, b = getattr(before, field.name), getattr(after, field.name)
        assert same(plain(a), b), (field.name, a, b)
    assert [p.name for p in path.parent.iterdir()] == ["result.safetensors"], "nothing lies beside it"


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=True), st.text(max_size=12)
)
DATA = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3),
        st.tuples(inner, inner),
    ),
    max_leaves=8,
)  # fmt: skip
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool)


@settings(max_examples=60, deadline=None)
@given(
    number=st.floats(allow_nan=True), count=st.integers(), flag=st.booleans(), text=st.text(),
    rows=st.lists(st.dictionaries(st.text(max_size=6), DATA, max_size=3), max_size=3),
    shape=st.lists(st.integers(0, 3), max_size=3), dtype=st.sampled_from(DTYPES), key=st.text(max_size=8),
)  # fmt: skip
def test_any_data_comes_back_exactly(
    tmp_path_factory: pytest.TempPathFactory, number: float, count: int, flag: bool, text: str,
    rows: list[dict[str, Any]], shape: list[int], dtype: torch.dtype, key: str,
) -> None:  # fmt: skip
    tensor = (torch.randn(shape) * 3).to(dtype)
    before = Sample(number, count, flag, text, tensor, {key: tensor}, None, rows, (1, text))
    path = before.save(tmp_path_factory.mktemp("any") / "r")
    assert same(before, Sample.load(path))


def test_views_of_one_storage_and_transposes_are_kept_apart(tmp_path: Path) -> None:
    base = torch.arange(6.0).reshape(2, 3)
    result = Sample(1.0, 1, True, "", base, {"a": base[0], "b": base.T}, None, [], (1, ""))
    back = Sample.load(result.save(tmp_path / "r"))
    assert torch.equal(back.named["a"], base[0])
    assert torch.equal(back.named["b"], base.T)


@pytest.mark.parametrize(
    "value",
    [object(), {1: 2}, {1, 2}, b"bytes", print, 1j],
    ids=["object", "dict with a number as key", "set", "bytes", "function", "complex"],
)
def test_what_is_not_data_is_refused_and_nothing_is_written(tmp_path: Path, value: Any) -> None:
    with pytest.raises(pl.StoreError, match="can't be saved"):
        Sample(1.0, 1, True, "", torch.ones(1), {}, None, [{"x": value}], (1, "")).save(tmp_path / "r")
    assert not list(tmp_path.iterdir())


# -- files that are not what they should be ---------------------------------------------------------


def interval() -> Interval:
    values = torch.rand(2, 5, generator=torch.Generator().manual_seed(1))
    return hierarchical_bootstrap(values, n_draws=20)


def forged(path: Path, change: Callable[[dict[str, Any]], Any], tensors: dict[str, Tensor] | None = None) -> Path:
    """The file of an Interval with another JSON header or other tensors."""
    from safetensors import safe_open

    interval().save(path)
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["probelens"])
        own = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    new = change(header)
    text = new if isinstance(new, str) else json.dumps(header if new is None else new)
    save_file(own if tensors is None else tensors, path, metadata={"probelens": text})
    return path


def field(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(header: dict[str, Any]) -> None:
        header["fields"][name] = value

    return change


def header(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(found: dict[str, Any]) -> None:
        found[name] = value

    return change


class Canary:
    """Unpickling this would leave a trace."""

    touched = False

    def __reduce__(self) -> Any:
        return (setattr, (Canary, "touched", True))


BAD_HEADERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no JSON": lambda h: "{",
    "empty": lambda h: "",
    "a number": lambda h: "7",
    "a list": lambda h: "[]",
    "null": lambda h: "null",
    "NaN": lambda h: "NaN",
    "nested 100,000 deep": lambda h: "[" * 100_000,
    "deep fields": lambda h: json.dumps(h).replace(
        '"fields": {', '"fields": {"level": ' + '{"l": [' * 3000 + '{"v": 1}' + "]}" * 3000 + ", "
    ).replace('"level": {"v": 0.95}, ', ""),
    "a huge integer": lambda h: json.dumps(h).replace("0.95", "9" * 5000),
    "no class": lambda h: h.pop("class") and None,
    "no fields": lambda h: h.pop("fields") and None,
    "another class": header("class", "PatchResult"),
    "a class of the system": header("class", "os:system"),
    "class is a list": header("class", ["Interval"]),
    "fields is a list": header("fields", []),
    "fields is text": header("fields", "level"),
    "an unknown field": field("__class__", {"v": "os.system"}),
    "a field missing": lambda h: h["fields"].pop("level") and None,
    "a field without its kind": field("level", {}),
    "a field of unknown kind": field("level", {"pickle": "gASVCgAAAAAAAACMAm9z"}),
    "a field that is bare": field("level", 0.95),
    "a number that is code": field("level", {"f": "__import__('os').system('true')"}),
    "a number that is text": field("level", {"v": "0.95"}),
    "a number that is a tensor": field("level", {"t": "estimate"}),
    "an integer that is a truth value": field("n_seeds", {"v": True}),
    "text that is an object": field("scope", {"v": {"a": 1}}),
    "a tensor that is missing": field("estimate", {"t": "nowhere"}),
    "a tensor that is text": field("estimate", {"v": "tensor"}),
    "a tensor that is a list": field("estimate", {"l": [{"v": 1.0}]}),
    "a nested class of the system": field("estimate", {"r": "os:system", "d": {"command": {"v": "true"}}}),
    "a nested class of subprocess": field("estimate", {"r": "subprocess:Popen", "d": {"args": {"v": "true"}}}),
    "a nested class that isn't a result": field("estimate", {"r": "probelens.cli.main:main", "d": {}}),
    "a nested module that isn't there": field("estimate", {"r": "probelens.nowhere:Interval", "d": {}}),
    "a nested path": field("estimate", {"r": "probelens.../../x:y", "d": {}}),
    "a nested class that is a number": field("estimate", {"r": 7, "d": {}}),
    "a nested result in a tensor's place": field(
        "estimate", {"r": "probelens.subspaces.subspace:Subspace", "d": {"basis": {"v": 1}, "mean": {"v": 1}}}
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD_HEADERS)
def test_hostile_headers_are_errors_and_run_nothing(tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []
    monkeypatch.setattr(os, "system", ran.append)
    monkeypatch.setattr("subprocess.Popen", lambda *a, **k: ran.append(a))
    path = forged(tmp_path / "r.safetensors", BAD_HEADERS[what])
    before = path.read_bytes()
    with pytest.raises(pl.StoreError, match=r"r\.safetensors") as caught:
        Interval.load(path)
    assert len(str(caught.value)) < 2000
    assert not ran
    assert path.read_bytes() == before
    # The control: the same forgery without a change is read.
    assert Interval.load(forged(tmp_path / "ok", lambda h: None)).level == 0.95


@pytest.mark.parametrize("payload", ["pickle", "torch", "text", "empty", "zip", "foreign", "npy"])
def test_files_of_other_kinds_are_errors_and_run_nothing(tmp_path: Path, payload: str) -> None:
    path = tmp_path / "r.safetensors"
    if payload == "pickle":
        path.write_bytes(pickle.dumps(Canary()))
    elif payload == "torch":
        torch.save({"x": Canary()}, path)
    elif payload == "foreign":
        save_file({"weight": torch.ones(2)}, path)
    elif payload == "npy":
        import numpy as np

        with path.open("wb") as file:
            np.save(file, np.array([Canary()], dtype=object), allow_pickle=True)
    else:
        path.write_bytes({"text": b"hello", "empty": b"", "zip": b"PK\x03\x04" + bytes(40)}[payload])
    for cls in (Interval, pl.Subspace, pl.Profile, Eraser, VerifyReport):
        with pytest.raises(pl.StoreError, match=r"r\.safetensors"):
            cls.load(path)
    assert not Canary.touched
    if payload == "pickle":
        pickle.loads(path.read_bytes())
        assert Canary.touched, "the control: unpickling would have shown"
        Canary.touched = False


def test_missing_files_and_folders_are_errors(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(pl.StoreError, match=r"is not a file of Interval\.save\(\): (there is no|it is a folder)"):
            Interval.load(path)


def test_a_file_cut_anywhere_is_an_error(tmp_path: Path) -> None:
    path = interval().save(tmp_path / "whole")
    whole, cut = path.read_bytes(), tmp_path / "cut"
    for end in [*range(64), *range(64, len(whole), max(1, len(whole) // 60)), len(whole) - 1]:
        cut.write_bytes(whole[:end])
        with pytest.raises(pl.StoreError):
            Interval.load(cut)


@settings(max_examples=150, deadline=None)
@given(where=st.floats(0, 1, exclude_max=True), byte=st.integers(0, 255), much=st.integers(1, 8))
def test_overwritten_bytes_are_an_error(
    tmp_path_factory: pytest.TempPathFactory, where: float, byte: int, much: int
) -> None:
    path = tmp_path_factory.mktemp("flip") / "r"
    interval().save(path)
    whole = path.read_bytes()
    content = bytearray(whole)
    at = int(where * len(content))
    content[at : at + much] = bytes([byte]) * len(content[at : at + much])
    path.write_bytes(bytes(content))
    try:
        found = Interval.load(path)
    except pl.StoreError:
        return
    # Where the name of the checksum itself is hit, the file is one without, and its numbers are whole.
    assert b"probelens.crc32" not in content or content == whole
    assert torch.equal(found.estimate, interval().estimate)


@pytest.mark.parametrize(
    ("change", "tensors"),
    [
        ("wrong shape", {"basis": torch.ones(2, 3), "mean": torch.zeros(4)}),
        ("wrong rank", {"basis": torch.ones(3), "mean": torch.zeros(3)}),
        ("wrong dtype", {"basis": torch.ones(1, 3, dtype=torch.bool), "mean": torch.zeros(3)}),
        ("not orthonormal", {"basis": torch.full((2, 3), 5.0), "mean": torch.zeros(3)}),
        ("NaN", {"basis": torch.full((1, 3), float("nan")), "mean": torch.zeros(3)}),
    ],
)
def test_a_subspace_of_wrong_shape_or_dtype_is_an_error(
    tmp_path: Path, change: str, tensors: dict[str, Tensor]
) -> None:
    text = json.dumps({"class": "Subspace", "fields": {"basis": {"t": "basis"}, "mean": {"t": "mean"}}})
    path = tmp_path / "s"
    save_file(tensors, path, metadata={"probelens": text})
    with pytest.raises(pl.StoreError, match="damaged"):
        pl.Subspace.load(path)


@pytest.mark.parametrize("fault", ["cut", "text", "integers", "shape", "config", "no keys", "hostile config"])
def test_damaged_checkpoints_of_models_are_errors(tmp_path: Path, fault: str) -> None:
    from safetensors import safe_open

    task = pl.tasks.Parity()
    model = pl.models.build(pl.models.FormalConfig.for_task("gru", task, n_layers=1, d_model=8, hidden_size=8))
    path = pl.models.save(model, tmp_path / "model.safetensors")
    with safe_open(path, framework="pt") as file:
        about, weights = file.metadata(), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    content = json.loads(about["probelens.model"])
    if fault == "cut":
        path.write_bytes(path.read_bytes()[:-10])
    elif fault == "text":
        path.write_text("not a model")
    else:
        if fault == "integers":
            weights = {key: value.to(torch.int32) for key, value in weights.items()}
        elif fault == "shape":
            weights["head.weight"] = weights["head.weight"][:, :-1].contiguous()
        elif fault == "no keys":
            weights = {"other": torch.ones(1)}
        elif fault == "config":
            content["config"]["n_layers"] = -1
        else:
            content["config"] = {"arch": "os.system", "d_vocab": 10**12}
        save_file(weights, path, metadata={"probelens.model": json.dumps(content)})
    before = path.read_bytes()
    for load in (pl.models.load, pl.load):
        with pytest.raises(pl.StoreError, match=r"model\.safetensors"):
            load(tmp_path)
    assert path.read_bytes() == before


# -- writing whole or not at all --------------------------------------------------------------------


def full_disk(*args: Any, **kw: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("moment", ["os.fsync", "os.replace", "tempfile.mkstemp", "safetensors.torch.save_file"])
def test_a_full_disk_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    path = interval().save(tmp_path / "r")
    before = path.read_bytes()
    monkeypatch.setattr(moment, full_disk)
    with pytest.raises(pl.StoreError, match="No space left"):
        interval().save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["r"]


def test_safetensors_own_error_on_a_full_disk_is_one_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors import SafetensorError

    def fails(*args: Any, **kw: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_file", fails)
    with pytest.raises(pl.StoreError, match="No space left"):
        interval().save(tmp_path / "r")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_device_that_is_really_full(tmp_path: Path) -> None:
    def write() -> None:
        with atomic_path(tmp_path / "r"), open("/dev/full", "wb") as full:
            full.write(bytes(1 << 20))

    with pytest.raises(pl.StoreError, match="No space left"):
        write()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, RuntimeError])
def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "r"
    path.write_text("old")

    def write() -> None:
        with atomic_path(path) as part:
            part.write_text("half")
            raise error

    with pytest.raises(error):
        write()
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["r"]


@pytest.mark.parametrize("place", ["read-only", "a file", "proc"])
def test_places_that_cannot_be_written_are_errors(tmp_path: Path, place: str) -> None:
    if place == "read-only":
        folder = tmp_path / "locked"
        folder.mkdir()
        folder.chmod(0o500)
        if os.access(folder, os.W_OK):
            pytest.skip("this user may write everywhere")
    elif place == "a file":
        folder = tmp_path / "file"
        folder.write_text("x")
    else:
        folder = Path("/proc/nowhere")
        if sys.platform != "linux":
            pytest.skip("no /proc")
    with pytest.raises(pl.StoreError, match="can't write"):
        interval().save(folder / "r")
    if place != "proc":
        assert [p.name for p in folder.rglob("*")] == []


def test_streamed_activations_that_are_damaged_or_foreign_are_errors(tmp_path: Path) -> None:
    model, x = pl.wrap(zoo.build("gru")), zoo.tokens(4)
    pl.collect(model, x, out=tmp_path / "a")
    record = tmp_path / "a" / "collect.json"
    good = json.loads(record.read_text())
    forgeries = [
        "{", "[]", "null", json.dumps({**good, "done": "many"}), json.dumps({**good, "files": 3}),
        json.dumps({**good, "key": "other"}), json.dumps({**good, "files": {"x": "../../../etc/passwd"}}),
    ]  # fmt: skip
    for text in forgeries:
        record.write_text(text)
        with pytest.raises(pl.StoreError):
            pl.collect(model, x, out=tmp_path / "a")
        assert record.read_text() == text
    record.write_text(json.dumps(good))
    data = next((tmp_path / "a").glob("*.npy"))
    data.write_bytes(pickle.dumps(Canary()))
    with pytest.raises(pl.StoreError):
        pl.collect(model, x, out=tmp_path / "a")
    assert not Canary.touched


def test_a_result_prints_in_a_line_and_says_its_shapes() -> None:
    result = Sample(1.0, 1, True, "", torch.zeros(50, 60), {"a": torch.zeros(2)}, None, [{"x": 1.0}] * 30, (1, ""))
    text = repr(result)
    assert text.startswith("Sample(")
    assert "tensor(50, 60)" in text
    assert "<list of 30>" in text
    assert len(text) < 400


def test_a_changed_number_in_a_file_of_tensors_is_an_error_and_a_file_without_a_checksum_is_read(
    tmp_path: Path,
) -> None:
    path = write_tensors(tmp_path / "t", {"x": torch.arange(4.0), "n": torch.tensor(True)}, {"by": "me"})
    tensors, header = read_tensors(path)
    assert tensors["x"].tolist() == [0, 1, 2, 3]
    assert tensors["n"].item() is True
    assert header == {"by": "me"}
    whole = path.read_bytes()
    changed = whole.replace(torch.arange(4.0).numpy().tobytes(), torch.tensor([0, 1, 2, 3.5]).numpy().tobytes())
    for other in (changed, whole.replace(b'"by":"me"', b'"by":"us"')):
        assert other != whole
        path.write_bytes(other)
        with pytest.raises(pl.StoreError, match="checksum differs. Bring the file back"):
            read_tensors(path)
    save_file({"x": torch.ones(2)}, path)
    assert read_tensors(path)[0]["x"].tolist() == [1, 1]


def test_a_changed_number_in_a_file_of_rows_is_an_error(tmp_path: Path) -> None:
    rows = pd.DataFrame({"value": [0.125, 0.25, 0.5], "word": ["a", "b", "c"]})
    path = write_rows(tmp_path / "rows.parquet", rows, compression="none")
    pd.testing.assert_frame_equal(read_rows(path), rows)
    whole = path.read_bytes()
    numbers = rows["value"].to_numpy().tobytes()
    assert numbers in whole
    path.write_bytes(whole.replace(numbers, (rows["value"] + 1).to_numpy().tobytes()))
    with pytest.raises(pl.StoreError, match="rows.parquet"):
        read_rows(path)
    rows.to_parquet(path, index=False)
    pd.testing.assert_frame_equal(read_rows(path), rows)
