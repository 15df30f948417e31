"""Streams of activations: edits never reach the files, changed numbers are noticed, memory stays free."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zoo

import probelens as pl
from probelens.running.stream import Stream

KEY = "blocks.1.hook_resid_post"


@pytest.fixture(scope="module")
def model() -> pl.HookedModel:
    return pl.wrap(zoo.build("neox"))


def test_what_is_changed_in_a_stream_changes_memory_and_never_the_file(model: pl.HookedModel, tmp_path: Path) -> None:
    x = zoo.tokens(5, 4)
    want = pl.collect(model, x, KEY)[KEY]
    acts = pl.collect(model, x, KEY, out=tmp_path, batch_size=2)
    array = tmp_path / "site_000.npy"
    before = array.read_bytes()
    assert torch.equal(acts[KEY].add_(1), want + 1)
    assert array.read_bytes() == before
    assert torch.equal(pl.collect(model, x, KEY, out=tmp_path)[KEY], want)
    # The control: through a map that is shared the file changes, and the stream is refused.
    np.load(array, mmap_mode="r+")[2] += 1
    with pytest.raises(pl.StoreError, match=r"examples 2 to 3 in .*site_000.npy.*remove"):
        pl.collect(model, x, KEY, out=tmp_path)
    array.write_bytes(before)
    assert torch.equal(pl.collect(model, x, KEY, out=tmp_path)[KEY], want)


class Stop(Exception):
    pass


def stopped(model: pl.HookedModel, x: torch.Tensor, out: Path, after: int) -> None:
    """A stream that ends after some batches of 2."""
    left, own = iter(range(after)), pl.HookedModel.run_with_cache

    def run(*args: Any, **kw: Any) -> Any:
        if next(left, None) is None:
            raise Stop
        return own(*args, **kw)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pl.HookedModel, "run_with_cache", run)
        with pytest.raises(Stop):
            pl.collect(model, x, KEY, out=out, batch_size=2)


def test_hooks_are_refused_and_every_weight_and_buffer_tells_a_stream_apart(tmp_path: Path) -> None:
    module = zoo.build("neox")
    model, x, out = pl.wrap(module), zoo.tokens(4, 4), tmp_path / "acts"
    module.register_buffer("kept", torch.zeros(3, dtype=torch.bfloat16))
    want = pl.collect(model, x, KEY, out=out)[KEY]

    def double(tensor: torch.Tensor, hook: pl.HookPoint) -> torch.Tensor:
        return 2 * tensor

    with model.hooks([("blocks.0.hook_resid_post", double)]):
        with pytest.raises(pl.InputError, match=r"hooks of add_hook\(\)"):
            pl.collect(model, x, KEY, out=out)
        with pytest.raises(pl.InputError, match=r"hooks of add_hook\(\)"):
            pl.collect(model, x, KEY, out=tmp_path / "other")
        assert not torch.allclose(pl.collect(model, x, KEY)[KEY], want), "in memory they count"
    handle = module.gpt_neox.layers[1].register_forward_pre_hook(lambda module, args: None)
    with pytest.raises(pl.InputError, match="gpt_neox.layers.1 has a PyTorch hook:"):
        pl.collect(model, x, KEY, out=out)
    handle.remove()
    weight = module.gpt_neox.layers[0].mlp.dense_h_to_4h.weight
    for tensor in (weight, module.gpt_neox.layers[2].mlp.dense_4h_to_h.bias, module.kept):
        last = tensor.detach().view(-1)[-2:-1]
        before = last.clone()
        last += 1  # one number, between those that a sample would take
        with pytest.raises(pl.StoreError, match="other weights or buffers"):
            pl.collect(model, x, KEY, out=out)
        last.copy_(before)
    assert torch.equal(pl.collect(model, x, KEY, out=out)[KEY], want)
    (out / "collect.json").write_text((out / "collect.json").read_text().replace('"format": 3', '"format": 2'))
    with pytest.raises(pl.StoreError, match="a stream of format 2, and this probelens reads format 3"):
        pl.collect(model, x, KEY, out=out)


def test_what_a_run_leaves_on_a_model_makes_it_no_other(tmp_path: Path) -> None:
    for name, change in (("rwkv", {"rescale_every": 1}), ("llama", {}), ("mamba", {})):
        model, x = pl.wrap(zoo.more(name, **change)), zoo.tokens(3, 4)
        acts = pl.collect(model, x, out=tmp_path / name)
        model(x, output_hidden_states=True)  # transformers puts hooks of its own on for it
        again = pl.collect(model, x, out=tmp_path / name)
        assert all(torch.equal(acts[site], again[site]) for site in acts)


def test_an_unfinished_stream_is_checked_as_far_as_it_got(model: pl.HookedModel, tmp_path: Path) -> None:
    x, out = zoo.tokens(7, 4), tmp_path / "acts"
    want = pl.collect(model, x, KEY)[KEY]
    stopped(model, x, out, after=2)
    record, array = out / "collect.json", out / "site_000.npy"
    good = json.loads(record.read_text())
    assert good["done"] == 4
    held = np.load(array, mmap_mode="r+")
    held[5] = 3  # not written yet: a kill may leave anything here
    held.flush()
    kept = array.read_bytes()
    held[1, 2, 3] += 1
    held.flush()
    with pytest.raises(pl.StoreError, match="examples 0 to 1 "):
        pl.collect(model, x, KEY, out=out)
    array.write_bytes(kept)
    # Another batch size: examples 3 and 4 come in one batch, and 3 is there already.
    assert torch.allclose(pl.collect(model, x, KEY, out=out, batch_size=3)[KEY], want, atol=1e-6)
    array.write_bytes(array.read_bytes()[:-4] + b"1234")
    with pytest.raises(pl.StoreError, match="are not what collect wrote"):
        pl.collect(model, x, KEY, out=out)


def test_a_stream_without_its_checksums_is_refused(model: pl.HookedModel, tmp_path: Path) -> None:
    x, record = zoo.tokens(4, 4), tmp_path / "collect.json"
    want = pl.collect(model, x, KEY, out=tmp_path)[KEY]
    good = json.loads(record.read_text())
    assert torch.equal(pl.collect(model, x, KEY, out=tmp_path)[KEY], want)
    sums = good["sums"]
    for wrong in ([], [*sums, sums[0]], [[2, *sums[0][1:]]], [[4]], [[4, 0, 0]], [[4, 0]], "x", None):
        record.write_text(json.dumps({**good, "sums": wrong}))
        with pytest.raises(pl.StoreError):
            pl.collect(model, x, KEY, out=tmp_path)


def test_the_record_of_a_stream_stays_small_and_every_row_is_checked(tmp_path: Path) -> None:
    n, store = 110, Stream(tmp_path, 110, "key")
    values = torch.randn(n, 2)
    for i in range(n):
        if i % 25 == 0:
            store = Stream(tmp_path, n, "key")
        store.put(i, {"a": values[i : i + 1], "b": -values[i : i + 1]})
    sums = json.loads((tmp_path / "collect.json").read_text())["sums"]
    assert len(sums) == 55  # two pieces share a checksum: never more than about 100
    assert torch.equal(Stream(tmp_path, n, "key").tensors()["b"], -values)
    array = tmp_path / "site_001.npy"
    whole = array.read_bytes()
    for row in (0, 1, 2, 67, 109):
        at = len(whole) - 8 * (n - row)
        array.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        start = row - row % 2
        with pytest.raises(pl.StoreError, match=f"examples {start} to {start + 1} in .*site_001"):
            Stream(tmp_path, n, "key")


def test_a_second_run_on_one_folder_waits_and_finds_what_the_first_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, x = pl.wrap(zoo.build("gru")), pl.wrap(zoo.build("gru")), zoo.tokens(6, 4)
    ran: list[str] = []
    found: dict[str, Any] = {}

    def other() -> None:
        found["second"] = pl.collect(second, x, KEY, out=tmp_path, batch_size=3)

    thread = threading.Thread(target=other)

    own = pl.HookedModel.run_with_cache

    def run(model: pl.HookedModel, *args: Any, **kw: Any) -> Any:
        ran.append("first" if model is first else "second")
        if len(ran) == 1:
            thread.start()
            thread.join(0.5)  # without the lock it would be done by now
            assert thread.is_alive()
        return own(model, *args, **kw)

    monkeypatch.setattr(pl.HookedModel, "run_with_cache", run)
    acts = pl.collect(first, x, KEY, out=tmp_path, batch_size=2)
    thread.join()
    assert ran == ["first"] * 3
    assert torch.equal(acts[KEY], found["second"][KEY])


def test_activations_load_says_how_a_stream_is_read(model: pl.HookedModel, tmp_path: Path) -> None:
    pl.collect(model, zoo.tokens(2, 3), KEY, out=tmp_path / "st")
    with pytest.raises(pl.StoreError, match=r"pl.collect with the same arguments and out='.*st'"):
        pl.Activations.load(tmp_path / "st")
    for cls, folder in ((pl.Activations, tmp_path), (pl.PatchResult, tmp_path / "st")):
        with pytest.raises(pl.StoreError, match="it is a folder"):
            cls.load(folder)


@pytest.mark.parametrize("out", ["", b"", b"acts", 3])
def test_a_folder_without_a_name_is_refused(
    model: pl.HookedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(pl.InputError, match="out must name a folder"):
        pl.collect(model, zoo.tokens(2, 3), KEY, out=out)
    assert list(tmp_path.iterdir()) == []
    pl.collect(model, zoo.tokens(2, 3), KEY, out=".")  # the control: said in so many words
    assert (tmp_path / "collect.json").exists()


def test_a_dtype_that_files_lack_is_refused_before_the_model_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half, full = pl.wrap(zoo.build("gru").to(torch.bfloat16)), pl.wrap(zoo.build("gru"))
    x, out = zoo.tokens(2, 3), tmp_path / "acts"
    with monkeypatch.context() as patch:
        patch.setattr(pl.HookedModel, "run_with_cache", lambda *args, **kw: pytest.fail("it ran"))
        for model, dtype in ((half, None), (full, torch.bfloat16), (full, torch.float8_e4m3fn)):
            with pytest.raises(pl.InputError, match="can't be streamed.*float16"):
                pl.collect(model, x, KEY, out=out, dtype=dtype)
    assert not out.exists()
    assert pl.collect(half, x, KEY, out=out, dtype=torch.float32)[KEY].dtype == torch.float32
    assert pl.collect(full, x, KEY, dtype=torch.bfloat16)[KEY].dtype == torch.bfloat16, "in memory they may"


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="the system doesn't tell")
def test_a_stream_larger_than_memory_is_mapped(tmp_path: Path) -> None:
    rows = 2**40 // 2**20
    store = Stream(tmp_path, rows, "key")
    store.files, store.arrays = {"site": "site_000.npy"}, {"site": ("<f4", (rows, 2**18))}
    path = tmp_path / "site_000.npy"
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (rows, 2**18)})
        try:
            file.truncate(file.tell() + 2**40)
        except OSError:
            pytest.skip("the disk takes no file of a TiB, even with nothing in it")
    if Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "0":
        with pytest.raises(OSError, match="allocate"):  # the control: numpy's own copy-on-write
            np.load(path, mmap_mode="c")
    held = store.tensors()["site"]
    held[-1] = 3
    assert held[-1].sum() == 3 * 2**18
    assert np.load(path, mmap_mode="r")[-1].sum() == 0


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system doesn't tell")
def test_what_is_on_disk_does_not_stay_in_memory(tmp_path: Path) -> None:
    def resident(kind: str = "RssFile") -> int:
        text = Path("/proc/self/status").read_text()
        return int(text.split(f"{kind}:")[1].split()[0]) * 1024

    piece = torch.ones(64, 128, 128)  # 4 MiB
    before = resident()
    store = Stream(tmp_path / "folder", 64 * 24, "key")
    with store.writing():
        for i in range(24):
            store.put(64 * i, {"site": piece})
    assert resident() - before < 3 * piece.nbytes
    own = resident("RssAnon")
    kept = Stream(tmp_path / "folder", 64 * 24, "key").tensors()["site"]
    assert resident() - before < 3 * piece.nbytes, "reading for the checksums maps nothing"
    assert all(bool((part == 1).all()) for part in kept.split(64))
    assert resident() - before > 20 * piece.nbytes  # the control: read through one map, all of it counts
    assert resident("RssAnon") - own < 3 * piece.nbytes, "no memory of its own as long as nothing is written"
    kept.add_(1)
    assert resident("RssAnon") - own > 20 * piece.nbytes  # the control
