"""collect: the same activations as one run, at the sites and positions asked for, in memory or on disk."""

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
from probelens._stream import Stream
from probelens.sites import expand, layer_of


@pytest.fixture(scope="module")
def model() -> pl.HookedModel:
    return pl.wrap(zoo.build("neox"))


def test_sites_are_shorthands_names_globs_and_lists(model: pl.HookedModel) -> None:
    post = [f"blocks.{i}.hook_resid_post" for i in range(3)]
    assert expand(model, "resid_post") == expand(model, "hook_resid_post") == post
    assert expand(model, "layers") == ["blocks.0.hook_resid_pre", *post]
    assert expand(model, "blocks.[12].hook_resid_post") == post[1:]
    assert expand(model, ["embed", "resid_post", post[0]]) == ["hook_embed", *post]
    assert expand(model, "pattern") == [f"blocks.{i}.attn.hook_pattern" for i in range(3)]
    mamba = pl.wrap(zoo.build("mamba"))
    assert expand(mamba, "mixer_out") == [f"blocks.{i}.mixer.hook_out" for i in range(3)]
    assert [layer_of(n, 3) for n in expand(model, "layers")] == [-1, 0, 1, 2]
    assert layer_of("ln_final.hook_in", 3) == 3
    for bad, text in (
        ("resid_mid", "parallel"),
        ("resid_pots", "resid_post"),
        ([], "empty"),
        ([3], "string"),
    ):
        with pytest.raises(pl.ProbelensError, match=text):
            expand(model, bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["neox", "mamba", "lstm", "gru-bidirectional-fused"])
def test_batches_give_what_one_run_gives(name: str) -> None:
    model, x = pl.wrap(zoo.build(name)), zoo.tokens(7, 6)
    with torch.no_grad():
        _, cache = model.run_with_cache(x)
    acts = pl.collect(model, x, ["layers", "unembed.hook_in"], batch_size=3)
    assert len(acts) == 7
    assert acts.names == [*expand(model, "layers"), "unembed.hook_in"]
    for site in acts:
        assert torch.allclose(acts[site], cache[site], atol=1e-5), site
    assert acts.layers["unembed.hook_in"] == 3
    assert torch.equal(acts.tokens, x)


def test_positions_dtype_and_masks(model: pl.HookedModel) -> None:
    batch = pl.tasks.Parity(bos=True).sample(5, length=6)
    full = pl.collect(model, batch, "resid_post")
    assert torch.equal(full.mask, batch.mask)
    one = pl.collect(model, batch, "resid_post", pos=-1, dtype=torch.float16)
    assert one["blocks.2.hook_resid_post"].shape == (5, 1, zoo.WIDTH)
    assert one["blocks.2.hook_resid_post"].dtype == torch.float16
    assert one.pos.tolist() == [6]
    some = pl.collect(model, batch, "resid_post", pos=[0, 3])
    assert torch.equal(some["blocks.1.hook_resid_post"], full["blocks.1.hook_resid_post"][:, [0, 3]])
    assert some.mask.tolist() == [[False, True]] * 5
    with pytest.raises(pl.ShapeError, match="allowed are"):
        pl.collect(model, batch, "resid_post", pos=[7])


def test_earlier_blocks_only_run_as_far_as_needed(model: pl.HookedModel) -> None:
    ran = []
    handle = model.module.gpt_neox.layers[2].register_forward_pre_hook(lambda m, a: ran.append(1))
    pl.collect(model, zoo.tokens(), "blocks.1.hook_resid_post")
    assert ran == []
    pl.collect(model, zoo.tokens(), "blocks.2.hook_resid_pre")
    handle.remove()
    assert ran == [1]


def test_dataset_rows_mappings_and_lists(model: pl.HookedModel) -> None:
    x = zoo.tokens(3, 4)
    want = pl.collect(model, x, "resid_post")["blocks.2.hook_resid_post"]
    for inputs in (x.tolist(), {"input_ids": x}, {"input_ids": x.tolist(), "attention_mask": [[1] * 4] * 3}):
        assert torch.allclose(
            pl.collect(model, inputs, "resid_post")["blocks.2.hook_resid_post"], want, atol=1e-5
        )
    ragged = pl.collect(model, {"input_ids": [[1, 2, 3], [4]]}, "resid_post")
    assert ragged.mask.tolist() == [[True] * 3, [True, False, False]]
    alone = pl.collect(model, torch.tensor([[4]]), "resid_post")
    key = "blocks.2.hook_resid_post"
    assert torch.allclose(ragged[key][1, :1], alone[key][0], atol=1e-5)
    for bad in ({"text": ["a"]}, object(), "text"):
        with pytest.raises(pl.InputError):
            pl.collect(model, bad, "resid_post")


class Tagger(torch.nn.Module):
    """A recurrent model of a user's own: its forward takes tokens and nothing else."""

    def __init__(self, bidirectional: bool) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(20, 8)
        self.rnn = torch.nn.GRU(8, 8, batch_first=True, bidirectional=bidirectional)
        self.head = torch.nn.Linear(16 if bidirectional else 8, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(self.embed(tokens))[0])


def test_a_model_that_takes_no_mask_is_read_where_padding_cannot_reach() -> None:
    key = "blocks.0.hook_resid_post"
    model = pl.wrap(Tagger(bidirectional=False))
    found = pl.collect(model, {"input_ids": [[1, 2, 3], [4]], "attention_mask": [[1, 1, 1], [1]]}, key)
    assert found.mask.tolist() == [[True] * 3, [True, False, False]]
    alone = pl.collect(model, torch.tensor([[4]]), key)
    assert torch.allclose(found[key][1, :1], alone[key][0], atol=1e-6)
    left = {"input_ids": [[1, 2, 3], [0, 0, 4]], "attention_mask": [[1, 1, 1], [0, 0, 1]]}
    both_ways = pl.wrap(Tagger(bidirectional=True))
    for asked, inputs in ((model, left), (both_ways, {"input_ids": [[1, 2, 3], [4]]})):
        with pytest.raises(pl.InputError, match="takes no attention_mask"):
            pl.collect(asked, inputs, key)


@pytest.mark.parametrize("kind", ["llama", "mamba", "mamba2"])
def test_padding_that_a_batch_names_is_kept_from_the_model(kind: str) -> None:
    model, key = pl.wrap(zoo.build(kind)), "blocks.1.hook_resid_post"
    x = zoo.tokens(4, 8)
    real = torch.arange(8) >= torch.tensor([0, 2, 3, 4])[:, None]
    labels = {"next": (x + 1) % 3}
    batch = pl.Batch(x.where(real, 0), labels, attention_mask=real)
    assert torch.equal(batch.mask, real), "labels on padding don't count"
    assert torch.equal(batch[1:3].attention_mask, real[1:3])
    told, untold = (pl.collect(model, b, key)[key] for b in (batch, pl.Batch(x.where(real, 0), labels, real)))
    size = told.abs().max()
    for i, row in enumerate(x):
        alone = pl.collect(model, row[real[i]][None], key)[key][0]
        assert torch.allclose(told[i][real[i]], alone, atol=1e-4 * float(size))
    assert (told - untold)[real].abs().max() > 1e-3 * size, "without it padding leaks in"
    # The same through the engine: what the ablation's unedited run loses on these examples.
    space = {key: pl.subspaces.random(1, told.shape[-1], seed=0)}
    lost = pl.ablate(model, batch, space, label="next", metric="next_token_loss", refit=False, controls=0)
    shown = lost.to_dataframe()["clean"].iloc[0]
    sums = []
    for i, row in enumerate(x):
        ids = row[real[i]][None]
        logits = model(ids)[0, :-1]
        sums.append(torch.nn.functional.cross_entropy(logits, ids[0, 1:]).item())
    assert shown == pytest.approx(sum(sums) / len(sums), rel=1e-3)


def test_a_stream_of_other_padding_is_not_gone_on_with(tmp_path: Path) -> None:
    model, x, key = pl.wrap(zoo.build("llama")), zoo.tokens(4, 8), "blocks.1.hook_resid_post"
    real = torch.arange(8) >= torch.tensor([0, 2, 3, 4])[:, None]
    pl.collect(model, pl.Batch(x, attention_mask=real), key, out=tmp_path / "acts")
    pl.collect(model, pl.Batch(x, attention_mask=real), key, out=tmp_path / "acts")
    with pytest.raises(pl.StoreError):
        pl.collect(model, x, key, out=tmp_path / "acts")


def test_a_batch_names_padding_that_the_model_cannot_be_told_of() -> None:
    key = "blocks.0.hook_resid_post"
    right = torch.tensor([[True, True, True], [True, False, False]])
    x = torch.tensor([[1, 2, 3], [4, 0, 0]])
    causal, both_ways = (pl.wrap(Tagger(bidirectional=b)) for b in (False, True))
    found = pl.collect(causal, pl.Batch(x, attention_mask=right), key)
    assert torch.allclose(found[key][1, :1], pl.collect(causal, x[1:, :1], key)[key][0], atol=1e-6)
    for model, mask in ((both_ways, right), (causal, right.flip(1))):
        with pytest.raises(pl.InputError, match="takes no attention_mask"):
            pl.collect(model, pl.Batch(x, attention_mask=mask), key)
        space = {key: pl.subspaces.random(1, model.cfg.d_model if model is causal else 16, seed=0)}
        with pytest.raises(pl.InputError, match="takes no attention_mask"):
            pl.ablate(
                model,
                pl.Batch(x, {"t": x % 3}, attention_mask=mask),
                space,
                label="t",
                refit=False,
                controls=0,
            )


def test_training_mode_and_gradients_come_back(model: pl.HookedModel) -> None:
    raw = zoo.build("gpt2").train()
    raw.transformer.drop.p = 0.5
    frozen = raw.transformer.h[0].eval()
    wrapped, x = pl.wrap(raw), zoo.tokens()
    a, b = (pl.collect(wrapped, x, "resid_post")["blocks.2.hook_resid_post"] for _ in range(2))
    assert torch.equal(a, b)
    assert raw.training
    assert not frozen.training
    assert not a.requires_grad


def test_a_stream_to_disk_is_equal_and_goes_on_where_it_stopped(
    model: pl.HookedModel, tmp_path: Path
) -> None:
    x = zoo.tokens(10, 5)
    want = pl.collect(model, x, "layers")
    calls = []

    class Stop(Exception):
        pass

    def stop_at_third(tensor: torch.Tensor, hook: pl.HookPoint) -> None:
        calls.append(len(tensor))
        if len(calls) == 3:
            raise Stop

    out = tmp_path / "acts"
    with pytest.raises(Stop), model.hooks([("hook_embed", stop_at_third)]):
        pl.collect(model, x, "layers", out=out, batch_size=3)
    assert json.loads((out / "collect.json").read_text())["done"] == 6
    with model.hooks([("hook_embed", stop_at_third)]):
        acts = pl.collect(model, x, "layers", out=out, batch_size=3)
    assert calls == [3, 3, 3, 3, 1]
    for site in want:
        assert torch.equal(acts[site], want[site])
    with pytest.raises(pl.StoreError, match="other data"):
        pl.collect(model, x.flip(0), "layers", out=out)
    assert torch.equal(
        pl.collect(model, x, "layers", out=out)["blocks.0.hook_resid_pre"], want["blocks.0.hook_resid_pre"]
    )
    (out / "collect.json").write_text("{")
    with pytest.raises(pl.StoreError, match="damaged"):
        pl.collect(model, x, "layers", out=out)


def test_activations_survive_the_disk(model: pl.HookedModel, tmp_path: Path) -> None:
    acts = pl.collect(model, pl.tasks.Parity(bos=True).sample(3, length=4), "layers")
    path = acts.save(tmp_path / "a.safetensors")
    back = pl.Activations.load(path)
    assert back.names == acts.names
    assert all(torch.equal(back[s], acts[s]) for s in acts)
    assert torch.equal(back.mask, acts.mask)
    assert set(acts.to_dataframe()["layer"]) == {-1, 0, 1, 2}
    with pytest.raises(pl.UnknownHookError, match="not collected"):
        acts["hook_embed"]


@pytest.mark.parametrize("kw", [{"batch_size": 0}, {"batch": torch.zeros(0, 4, dtype=torch.long)}])
def test_nothing_to_collect_is_an_error(model: pl.HookedModel, kw: dict) -> None:
    batch = kw.pop("batch", zoo.tokens())
    with pytest.raises(pl.ProbelensError):
        pl.collect(model, batch, "resid_post", **kw)


KEY = "blocks.1.hook_resid_post"


def test_what_is_changed_in_a_stream_changes_memory_and_never_the_file(
    model: pl.HookedModel, tmp_path: Path
) -> None:
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
    left = iter(range(after))

    def stop(tensor: torch.Tensor, hook: pl.HookPoint) -> None:
        if next(left, None) is None:
            raise Stop

    with pytest.raises(Stop), model.hooks([("hook_embed", stop)]):
        pl.collect(model, x, KEY, out=out, batch_size=2)


@pytest.mark.parametrize("old", [False, True])
def test_an_unfinished_stream_is_checked_as_far_as_it_got(
    model: pl.HookedModel, tmp_path: Path, old: bool
) -> None:
    x, out = zoo.tokens(7, 4), tmp_path / "acts"
    want = pl.collect(model, x, KEY)[KEY]
    stopped(model, x, out, after=2)
    record, array = out / "collect.json", out / "site_000.npy"
    good = json.loads(record.read_text())
    assert good["done"] == 4
    if old:  # as it was before there were checksums
        record.write_text(json.dumps({k: v for k, v in good.items() if k not in ("format", "sums")}))
    held = np.load(array, mmap_mode="r+")
    held[5] = 3  # not written yet: a kill may leave anything here
    held.flush()
    kept = array.read_bytes()
    held[1, 2, 3] += 1
    held.flush()
    if not old:
        with pytest.raises(pl.StoreError, match="examples 0 to 1 "):
            pl.collect(model, x, KEY, out=out)
    array.write_bytes(kept)
    # Another batch size: examples 3 and 4 come in one batch, and 3 is there already.
    assert torch.allclose(pl.collect(model, x, KEY, out=out, batch_size=3)[KEY], want, atol=1e-6)
    array.write_bytes(array.read_bytes()[:-4] + b"1234")
    with pytest.raises(pl.StoreError, match="are not what collect wrote"):
        pl.collect(model, x, KEY, out=out)


def test_a_finished_stream_without_checksums_is_read(model: pl.HookedModel, tmp_path: Path) -> None:
    x, record = zoo.tokens(4, 4), tmp_path / "collect.json"
    want = pl.collect(model, x, KEY, out=tmp_path)[KEY]
    good = json.loads(record.read_text())
    record.write_text(json.dumps({k: v for k, v in good.items() if k not in ("format", "sums")}))
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


def test_a_second_run_on_one_folder_waits_and_finds_what_the_first_wrote(tmp_path: Path) -> None:
    first, second, x = pl.wrap(zoo.build("gru")), pl.wrap(zoo.build("gru")), zoo.tokens(6, 4)
    ran: list[str] = []
    found: dict[str, Any] = {}

    second.module.register_forward_pre_hook(lambda module, args: ran.append("second"))

    def other() -> None:
        found["second"] = pl.collect(second, x, KEY, out=tmp_path, batch_size=3)

    thread = threading.Thread(target=other)

    def meanwhile(tensor: torch.Tensor, hook: pl.HookPoint) -> None:
        ran.append("first")
        if len(ran) == 1:
            thread.start()
            thread.join(0.5)  # without the lock it would be done by now
            assert thread.is_alive()

    with first.hooks([("hook_embed", meanwhile)]):
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


def test_a_dtype_that_files_lack_is_refused_before_the_model_runs(tmp_path: Path) -> None:
    half, full = pl.wrap(zoo.build("gru").to(torch.bfloat16)), pl.wrap(zoo.build("gru"))
    x, ran, out = zoo.tokens(2, 3), [], tmp_path / "acts"
    for model, dtype in ((half, None), (full, torch.bfloat16), (full, torch.float8_e4m3fn)):
        with pytest.raises(pl.InputError, match="can't be streamed.*float16"), model.hooks(
            [("hook_embed", lambda tensor, hook: ran.append(1))]
        ):  # fmt: skip
            pl.collect(model, x, KEY, out=out, dtype=dtype)
    assert ran == []
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
        np.lib.format.write_array_header_1_0(
            file, {"descr": "<f4", "fortran_order": False, "shape": (rows, 2**18)}
        )
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
