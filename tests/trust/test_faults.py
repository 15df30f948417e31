"""Files that are cut, forged or in the way, disks that are full, code that files would like to run: what happens."""

from __future__ import annotations

import ast
import contextlib
import errno
import json
import os
import pickle
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import primitives
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import zoo

import probelens as pl
from probelens.experiments import RunRecord, Store
from probelens.results.files import atomic_path, read_rows, read_tensors

ROOT = Path(__file__).resolve().parents[2]
X = zoo.tokens(3, 5)
SITE = "blocks.1.hook_resid_post"


class Canary:
    """Unpickling one shows."""

    touched = False

    def __reduce__(self) -> Any:
        return (setattr, (Canary, "touched", True))


# -- every file that is read ------------------------------------------------------------------------


def formal(**sizes: Any) -> Any:
    config = pl.models.FormalConfig.for_task("gru", pl.tasks.Parity(), n_layers=1, d_model=8, hidden_size=8)
    return pl.models.build(config)


def half_trained(folder: Path) -> Path:
    steps = iter(range(3))

    def stop(row: Any) -> None:
        if next(steps, None) is None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(folder, stop)
    return folder / "train.safetensors"


def train(folder: Path, progress: Any = False) -> None:
    config = pl.training.TrainConfig(
        steps=5,
        batch_size=4,
        decay_steps=1,
        length=5,
        eval_sequences=4,
        start_length=None,
        checkpoint_every=1,
        target_accuracy=None,
    )
    pl.training.train(formal(), pl.tasks.Parity(), config=config, checkpoint_dir=folder, progress=progress)


def streamed(folder: Path) -> Path:
    pl.collect(pl.wrap(zoo.build("lstm")), X, [SITE], out=folder, batch_size=2)
    return folder


def cell(folder: Path) -> Path:
    return Store(folder).write("ab", {"x": 1}, [{"a": 1.5, "b": "text"}, {"a": 2.5, "b": "more"}]).parent


def huggingface(folder: Path) -> Path:
    zoo.build("neox").save_pretrained(folder)
    return folder


@dataclass
class File:
    make: Callable[[Path], Path]
    read: Callable[[Path], Any]
    error: type[Exception] = pl.StoreError


FILES = {
    "a result": File(
        lambda d: pl.patch(pl.wrap(zoo.build("lstm")), primitives.PAIRS, "resid_pre").save(d / "r"), pl.PatchResult.load
    ),
    "an eraser": File(lambda d: pl.leace(torch.randn(9, 3), torch.arange(9) % 2).save(d / "e"), pl.Eraser.load),
    "a formal model": File(lambda d: pl.models.save(formal(), d / "model.safetensors"), pl.models.load),
    "a training": File(half_trained, lambda p: train(p.parent)),
    "the record of a run": File(lambda d: RunRecord("quickstart", {"seed": 1}, ["ab"]).save(d), lambda p: RunRecord.load(p.parent)),
    "the config of a cell": File(lambda d: cell(d) / "config.json", lambda p: Store(p.parents[2]).config("ab")),
    "the rows of a cell": File(lambda d: cell(d) / "rows.parquet", lambda p: Store(p.parents[2]).rows("ab")),
    "the record of a stream": File(lambda d: streamed(d) / "collect.json", lambda p: streamed(p.parent)),
    "streamed activations": File(lambda d: streamed(d) / "site_000.npy", lambda p: streamed(p.parent)),
    "weights of transformers": File(lambda d: huggingface(d) / "model.safetensors", lambda p: pl.load(p.parent), pl.InputError),
    "a config of transformers": File(lambda d: huggingface(d) / "config.json", lambda p: pl.load(p.parent), pl.InputError),
}  # fmt: skip
SEALED = ("a result", "an eraser", "a formal model")
SLOW = ("weights of transformers", "a config of transformers", "a training")


def damaged(whole: bytes, name: str) -> dict[str, bytes]:
    """Contents that are no longer what was written, by what was done to them."""
    rng = random.Random(name)
    few = 12 if name in SLOW else 40
    ends = sorted({0, 1, 7, 8, 9, len(whole) - 1, *(int(len(whole) * i / few) for i in range(few))})
    found = {f"cut at {end}": whole[:end] for end in ends}
    for i in range(few):
        at, much = rng.randrange(len(whole)), rng.randint(1, 8)
        found[f"{much} other bytes at {at}"] = (
            whole[:at] + rng.randbytes(much) + whole[at + much :] if i % 2 else whole[:at] + whole[at + much :]
        )
    header = len(whole) * 2
    for what, size in {"a header beyond the file": header, "a header of 2^63": 2**63 - 1, "no header": 0}.items():
        found[what] = size.to_bytes(8, "little") + whole[8:]
    found |= {
        "a pickle": pickle.dumps(Canary()), "zeros": bytes(len(whole)), "text": b"hello", "a list": b"[]",
        "null": b"null", "deep": b"[" * 100_000, "NaN": b"NaN", "not UTF-8": b"\xff\xfe\x00",
        "a huge number": b'{"done": ' + b"9" * 6000 + b"}",
    }  # fmt: skip
    return found


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_an_error_or_read_and_is_left_as_it_is(tmp_path: Path, name: str) -> None:
    kind = FILES[name]
    path = kind.make(tmp_path / "whole")
    whole = path.read_bytes()
    beside = {p: p.read_bytes() for p in path.parent.iterdir() if p.is_file() and p != path}
    refused = []
    for what, content in damaged(whole, name).items():
        path.write_bytes(content)
        try:
            kind.read(path)
        except kind.error:
            refused.append(what)
            assert path.read_bytes() == content, f"{what}: written over"
            assert {p: p.read_bytes() for p in beside if p.exists()} == beside, what
        except Exception as err:
            raise AssertionError(f"{name}, {what}: {type(err).__name__}: {err}") from err
        else:
            # In JSON and in what others write, other numbers in the place of numbers can't be told; JSON without its end may be whole.
            assert what[0].isdigit() or content.rstrip() == whole.rstrip() or "weights" in name, what
            assert name != "streamed activations" or content[128 : len(whole)] == whole[128:], what
            # Where the name of the checksum itself is hit, the file is one without.
            assert name not in SEALED or b"probelens.crc32" not in content or content == whole, what
        for p, before in beside.items():
            p.write_bytes(before)
    assert not Canary.touched
    assert len(refused) > 10
    path.write_bytes(whole)
    kind.read(path)  # the control


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("what", ["a folder", "a link to nowhere", "a link to itself", "nothing"])
def test_something_else_in_the_place_of_a_file_is_an_error(tmp_path: Path, name: str, what: str) -> None:
    kind = FILES[name]
    path = kind.make(tmp_path / "whole")
    path.unlink()
    if what == "a folder":
        path.mkdir()
    elif what == "a link to nowhere":
        path.symlink_to(tmp_path / "nowhere")
    elif what == "a link to itself":
        path.symlink_to(path)
    if name in ("a training", "the record of a stream", "a config of transformers") and what != "a folder":
        # Without this file there is another beginning; but never through a link.
        with contextlib.suppress(pl.StoreError, pl.InputError):
            kind.read(path)
        assert not (tmp_path / "nowhere").exists()
        return
    with pytest.raises((pl.StoreError, pl.InputError)):
        kind.read(path)
    assert not (tmp_path / "nowhere").exists()


def test_a_formal_model_that_says_it_is_huge_is_not_made(tmp_path: Path) -> None:
    path = pl.models.save(formal(), tmp_path / "model.safetensors")
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    for change in ({"d_vocab": 2**31}, {"d_model": 2**20}, {"n_layers": 10**7}, {"hidden_size": 2**20}):
        config = {**pl.models.config_of(formal()).to_dict(), **change}
        save_file(tensors, path, metadata={"probelens.model": json.dumps({"format": 1, "config": config})})
        with pytest.raises(pl.StoreError, match="does not fit"):
            pl.models.load(path)


def test_a_file_of_tensors_larger_than_memory_is_refused_before_it_is_read(tmp_path: Path) -> None:
    size = 2**40  # a hole: the file takes a block of the disk
    header = json.dumps({"x": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    try:
        os.truncate(path, 8 + len(header) + size)
    except OSError:
        pytest.skip("the file system has no files with holes")
    for read in (read_tensors, pl.models.load, pl.Profile.load):
        with pytest.raises(pl.StoreError, match=r"needs 1,099,511,\d{3},\d{3} bytes of memory"):
            read(path)


def test_a_table_that_grows_to_fill_the_memory_is_refused_before_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = pa.DictionaryArray.from_arrays(pa.array(np.zeros(1_000_000, np.int32)), pa.array(["x" * 4000]))
    pq.write_table(pa.table({"t": text[:1000].dictionary_decode()}), tmp_path / "small.parquet")
    assert len(read_rows(tmp_path / "small.parquet")) == 1000, "the control"
    schema = pa.schema([("t", pa.string())])
    with pq.ParquetWriter(tmp_path / "bomb.parquet", schema) as writer:
        for _ in range(40):
            writer.write_table(pa.table({"t": text[:10_000].dictionary_decode()}, schema))
    assert (tmp_path / "bomb.parquet").stat().st_size < 1_000_000
    monkeypatch.setattr("probelens.results.files._PLAUSIBLE", 2**27)
    before = pa.total_allocated_bytes()
    with pytest.raises(pl.StoreError, match="bytes in memory"):
        read_rows(tmp_path / "bomb.parquet")
    assert pa.default_memory_pool().max_memory() - before < 4 * 2**27, "of 1.6 GB"


# -- links out of a folder --------------------------------------------------------------------------


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    """A folder that others can write to may hold links to files that they can't."""
    secret = tmp_path / "secret"
    secret.write_text("mine")
    folder = tmp_path / "run"
    (folder / "cells" / "ab").mkdir(parents=True)
    names = ("run.json", "report.html", "cells/ab/rows.parquet", "cells/ab/config.json", "r", "model.safetensors",
             "train.safetensors", "collect.json", "status.json")  # fmt: skip
    for name in names:
        (folder / name).symlink_to(secret)
    RunRecord("quickstart", {}).save(folder)
    cell(folder)
    pl.leace(torch.randn(9, 3), torch.arange(9) % 2).save(folder / "r")
    pl.models.save(formal(), folder / "model.safetensors")
    pl.report.write_report(folder / "report.html", title="t", lead="l", sections=[])
    for name in ("train.safetensors", "collect.json", "status.json"):
        with atomic_path(folder / name) as part:
            part.write_text("new")
    assert secret.read_text() == "mine"
    assert not any((folder / name).is_symlink() for name in names), "the link itself is replaced"


def test_streams_are_not_written_through_a_link(tmp_path: Path) -> None:
    # Arrays are written in place, where a link would be followed.
    secret = tmp_path / "secret"
    secret.write_text("mine")
    (tmp_path / "acts").mkdir()
    (tmp_path / "acts" / "site_000.npy").symlink_to(secret)
    with pytest.raises(pl.StoreError, match="is a link"):
        streamed(tmp_path / "acts")
    assert secret.read_text() == "mine"
    streamed(tmp_path / "whole")
    array = tmp_path / "whole" / "site_000.npy"
    array.rename(tmp_path / "elsewhere.npy")
    array.symlink_to(tmp_path / "elsewhere.npy")
    with pytest.raises(pl.StoreError, match="is a link"):
        streamed(tmp_path / "whole")


def test_a_stream_of_other_shape_or_dtype_is_an_error(tmp_path: Path) -> None:
    array = streamed(tmp_path) / "site_000.npy"
    held = np.load(array)
    for other in (held[:, :-1], held[:-1], held.astype(np.float64), np.zeros((10**6, 1), np.float32)[:3]):
        np.save(array, other)
        before = array.read_bytes()
        with pytest.raises(pl.StoreError, match="not what was written"):
            streamed(tmp_path)
        assert array.read_bytes() == before


# -- disks that are full, folders that can't be written ---------------------------------------------


def full(*args: Any, **kw: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


WRITERS: dict[str, Callable[[Path], Any]] = {
    "a result": lambda d: pl.leace(torch.randn(9, 3), torch.arange(9) % 2).save(d / "r"),
    "a formal model": lambda d: pl.models.save(formal(), d / "m"),
    "a training": train,
    "the record of a run": lambda d: RunRecord("quickstart", {}).save(d),
    "a cell": cell,
    "a report": lambda d: pl.report.write_report(d / "r.html", title="t", lead="l", sections=[]),
    "a stream": streamed,
}


# Only arrays, which are written in place, reserve their space.
MOMENTS = [(n, m) for n in WRITERS for m in ("os.fsync", "tempfile.mkstemp", "os.replace")]
MOMENTS += [("a stream", "os.posix_fallocate")] * hasattr(os, "posix_fallocate")


@pytest.mark.parametrize(("name", "moment"), MOMENTS)
def test_a_full_disk_is_an_error_that_leaves_no_half_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, moment: str
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(moment, full)
        with pytest.raises(pl.StoreError, match="No space left"):
            WRITERS[name](tmp_path)
    left = [p.name for p in tmp_path.rglob("*") if p.is_file()]
    assert not [n for n in left if n.endswith(".part") or n in ("run.json", "rows.parquet", "collect.json", "r", "m")]
    WRITERS[name](tmp_path)  # with room again the same call goes on


def small_disk(folder: Path) -> bool:
    """A real file system of 256 kB, where this user may mount one."""
    if shutil.which("mount") is None or os.geteuid() != 0:
        return False
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)], capture_output=True, check=False
    )
    return done.returncode == 0


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    if not small_disk(tmp_path):
        pytest.skip("this user can't mount a file system")
    try:
        keep = pl.leace(torch.randn(9, 3), torch.arange(9) % 2).save(tmp_path / "keep")
        before = keep.read_bytes()
        big = pl.Subspace(torch.linalg.qr(torch.randn(300, 300))[0], torch.zeros(300))
        with pytest.raises(pl.StoreError, match="No space left"):
            big.save(keep)
        assert keep.read_bytes() == before
        model = pl.wrap(zoo.build("lstm"))
        # 4 MB in a sparse file would be accepted, and its writing end in a crash of the process (SIGBUS).
        with pytest.raises(pl.StoreError, match="No space left"):
            pl.collect(model, zoo.tokens(1000, 64), [SITE], out=tmp_path / "acts", batch_size=1000)
        with pytest.raises(pl.StoreError, match="No space left"):
            pl.report.write_report(tmp_path / "r.html", title="t", lead="l", sections=[])
        assert sorted(p.name for p in tmp_path.rglob("*") if p.is_file()) == ["collect.lock", "keep"]
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_folder_that_may_not_be_written_is_an_error(tmp_path: Path) -> None:
    """In a process without root's right to write everywhere, where the tests run as root."""
    drop = []
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("root writes everywhere, and there is no setpriv to give that up")
        drop = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"]
    locked = tmp_path / "locked"
    locked.mkdir()
    RunRecord("quickstart", {}).save(locked)
    for name in ("finished", "begun"):
        array = streamed(locked / name) / "site_000.npy"
        array.chmod(0o444)
    record = locked / "begun" / "collect.json"
    content = json.loads(record.read_text())
    record.write_text(json.dumps({**content, "done": 2, "sums": content["sums"][:1]}))
    for folder in (locked, locked / "finished", locked / "begun"):
        folder.chmod(0o555)
    code = (
        "import sys, numpy as np, torch, probelens as pl\n"
        "from pathlib import Path\nfrom probelens.cli.main import main\nfrom probelens.experiments import RunRecord, Store\n"
        "place = Path(sys.argv[1])\n"
        "calls = [lambda: RunRecord('quickstart', {}).save(place), lambda: RunRecord('x', {}).save(place / 'new'),\n"
        "  lambda: pl.leace(torch.randn(9, 3), torch.arange(9) % 2).save(place / 'r'),\n"
        "  lambda: Store(place).write('ab', {}, [{'a': 1}]),\n"
        "  lambda: pl.report.write_report(place / 'r.html', title='t', lead='l', sections=[])]\n"
        "for call in calls:\n"
        "    try:\n        call()\n"
        '    except pl.StoreError as err:\n        assert "can\'t write" in str(err), err\n'
        "    else:\n        raise SystemExit('written')\n"
        "import test_faults\n"
        "assert len(np.load(test_faults.streamed(place / 'finished') / 'site_000.npy')) == 3\n"
        "try:\n    test_faults.streamed(place / 'begun')\n"
        "except pl.StoreError as err:\n    assert 'Permission denied' in str(err) and 'Remove' not in str(err), err\n"
        "else:\n    raise SystemExit('written')\n"
        "print('refused', main(['run', 'quickstart', '--preset', 'smoke', '--out', str(place / 'run')]))\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    done = subprocess.run(
        [*drop, sys.executable, "-c", code, str(locked)],
        env=env, capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.stdout.strip() == "refused 2", done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(p.name for p in locked.iterdir()) == ["begun", "finished", "run.json"]
    for folder in (locked, locked / "finished", locked / "begun"):
        folder.chmod(0o755)


# -- code that files would like to run --------------------------------------------------------------

SOURCES = sorted(
    p for top in ("probelens", "adapters", "examples") for p in (ROOT / top).rglob("*.py") if p.resolve() == p
)
READS_PICKLES = {"pickle", "cPickle", "_pickle", "dill", "joblib", "shelve", "marshal"}
# What workers and the process that started them send each other; no file of results is read so.
BETWEEN_PROCESSES = {ROOT / "probelens" / "running" / "workers.py": ["import pickle"]}
RUNS_TEXT = {"eval", "exec", "compile", "__import__"}


def forbidden(tree: ast.AST) -> list[str]:
    """What in a source could run code out of a file."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            found += [f"import {n}" for n in names if n.partition(".")[0] in READS_PICKLES]
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        said = {k.arg: ast.unparse(k.value) for k in node.keywords}
        if name in RUNS_TEXT or name in ("os.system", "os.popen"):
            found.append(name)
        if name.endswith("torch.load") and said.get("weights_only") != "True":
            found.append("torch.load without weights_only=True")
        if name.endswith("np.load") and said.get("allow_pickle") != "False":
            found.append("np.load that may unpickle")
        if said.get("allow_pickle") == "True" or said.get("shell") == "True":
            found.append(f"{name} with allow_pickle or shell")
        if name.endswith(("read_pickle", "yaml.load", "cloudpickle.load", "cloudpickle.loads")):
            found.append(name)
        if said.get("trust_remote_code", "False") == "True":
            found.append("trust_remote_code that nobody asked for")
    return found


def test_no_source_unpickles_or_runs_text() -> None:
    assert len(SOURCES) > 90
    found = {p: found for p in SOURCES if (found := forbidden(ast.parse(p.read_text())))}
    assert found == BETWEEN_PROCESSES


@pytest.mark.parametrize(
    "text",
    ["import pickle", "from joblib import load", "torch.load(p)", "np.load(p)", "eval(x)", "torch.load(p, weights_only=False)",
     "np.load(p, allow_pickle=True)", "subprocess.run(x, shell=True)", "pd.read_pickle(p)", "f(trust_remote_code=True)"],
)  # fmt: skip
def test_a_source_that_would_is_noticed(text: str) -> None:
    assert forbidden(ast.parse(text))


def test_remote_code_is_off_unless_asked_for_everywhere() -> None:
    import inspect

    assert inspect.signature(pl.load).parameters["trust_remote_code"].default is False
    calls = [
        ast.unparse(node)
        for p in SOURCES
        for node in ast.walk(ast.parse(p.read_text()))
        if isinstance(node, ast.Call) and re.search(r"(?<!nn\.Embedding)\.from_pretrained$", ast.unparse(node.func))
    ]
    # Every call says it, or hands on what the user said.
    assert len(calls) >= 3
    assert all("trust_remote_code" in c or "**options" in c for c in calls), calls
