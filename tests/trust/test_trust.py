"""What a user may do wrong, interrupt or do at once: nothing is left on the model, lost, or taken for another thing."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import string
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grid_cells
import pytest
import torch
import zoo
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import probelens as pl
from probelens.experiments import Store, cell_key
from probelens.hooks.names import resolve
from probelens.hooks.points import HookPoint
from probelens.hooks.verify import left_behind

FAMILIES = ("neox", "mamba", "lstm-fused")
MODELS = {name: pl.wrap(zoo.build(name)) for name in FAMILIES}
LENGTH = 6
X = zoo.tokens(4, LENGTH)
LOGITS = {name: model(X) for name, model in MODELS.items()}
PLAIN = {name: set(left_behind(model.module)) for name, model in MODELS.items()}
RESID = "blocks.1.hook_resid_post"


def clean(name: str) -> None:
    """Nothing on the module, nobody listening, same output."""
    model = MODELS[name]
    assert set(left_behind(model.module)) == PLAIN[name]
    assert not model.has_hooks()
    assert not model.switchboard.entries
    assert not model.switchboard._handles
    assert not model.switchboard._instruments
    assert not model.module.training
    assert torch.equal(model(X), LOGITS[name])


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Every test here starts and ends with models that carry nothing."""
    yield
    for name in FAMILIES:
        clean(name)


# -- names ------------------------------------------------------------------------------------------

PARTS = ("blocks", "0", "2", "3", "-1", "*", "?", "[0-9]", "hook_resid_post", "hook_", "mixer", "attn", "hook_z", "hook_out",
         "hook_in", "gpt_neox", "layers", "", "ln_final", "rnn", "hook_h", "__class__", "..", "/", "resid_post", "\u2603", "\0", "[", "]")  # fmt: skip
NAMES = st.one_of(
    st.text(max_size=30),
    st.text(alphabet=string.ascii_lowercase + ".*?[]!_0123456789", max_size=30),
    st.lists(st.sampled_from(PARTS), max_size=6).map(".".join),
    st.sampled_from([n for m in MODELS.values() for n in m.hook_dict]).flatmap(
        lambda n: st.integers(0, len(n)).map(lambda i: n[:i] + n[i + 1 :])
    ),
)


@settings(max_examples=250, deadline=None)
@given(name=NAMES, family=st.sampled_from(FAMILIES))
def test_any_text_is_a_hook_point_or_an_unknown_hook_error(name: str, family: str) -> None:
    model = MODELS[family]
    try:
        point = model.point(name)
    except pl.UnknownHookError:
        assert name not in model.hook_dict
    else:
        assert isinstance(point, HookPoint)
        assert point.name in model.hook_dict or model.module.get_submodule(point.module) is not None
    try:
        points = resolve(model, name)
    except pl.UnknownHookError:
        return
    assert points
    assert all(model.point(p.name).name == p.name for p in points)


@settings(max_examples=60, deadline=None)
@given(
    wanted=st.one_of(
        st.none(), st.integers(), st.floats(), st.booleans(), st.binary(max_size=3),
        st.lists(st.one_of(NAMES, st.integers(), st.none()), max_size=3), st.tuples(NAMES, NAMES),
    )
)  # fmt: skip
def test_anything_as_a_names_filter_is_points_or_one_of_our_errors(wanted: Any) -> None:
    model = MODELS["neox"]
    try:
        points = resolve(model, wanted)
    except pl.UnknownHookError:
        return
    assert points
    assert all(isinstance(p, HookPoint) for p in points)


@settings(max_examples=60, deadline=None)
@given(name=NAMES)
def test_a_name_that_is_no_point_never_runs_the_model(name: str) -> None:
    model = MODELS["mamba"]
    with contextlib.suppress(pl.UnknownHookError):
        resolve(model, name)
        return
    ran: list[Any] = []
    handle = model.module.register_forward_pre_hook(lambda *a: ran.append(a))
    try:
        for call in (
            lambda: model.run_with_hooks(X, [(name, lambda t, hook: t)]),
            lambda: model.run_with_cache(X, name),
            lambda: model.add_hook(name, lambda t, hook: t),
            lambda: pl.collect(model, X, [name]),
        ):
            with pytest.raises(pl.UnknownHookError):
                call()
    finally:
        handle.remove()
    assert not ran


# -- positions, masks, batch sizes ------------------------------------------------------------------

POSITIONS = st.one_of(
    st.none(), st.integers(-9, 9), st.lists(st.integers(-9, 9), max_size=4),
    st.builds(slice, st.none() | st.integers(-9, 9), st.none() | st.integers(-9, 9), st.none() | st.integers(1, 3)),
)  # fmt: skip


def chosen(pos: Any) -> list[int] | None:
    """What numpy would select of LENGTH positions; None where it wouldn't."""
    every = list(range(LENGTH))
    if pos is None:
        return every
    if isinstance(pos, slice):
        return every[pos]
    wanted = [pos] if isinstance(pos, int) else pos
    return [p % LENGTH for p in wanted] if all(-LENGTH <= p < LENGTH for p in wanted) else None


@settings(max_examples=120, deadline=None)
@given(pos=POSITIONS, batch_size=st.integers(1, 6), family=st.sampled_from(FAMILIES))
def test_collect_keeps_the_positions_asked_for_whatever_the_batch_size(pos: Any, batch_size: int, family: str) -> None:
    model = MODELS[family]
    _, cache = model.run_with_cache(X, RESID)
    wanted = chosen(pos)
    if not wanted:
        with contextlib.suppress(pl.ProbelensError):
            found = pl.collect(model, X, [RESID], pos=pos, batch_size=batch_size)
            assert wanted == []
            assert found[RESID].shape[1] == 0
        return
    found = pl.collect(model, X, [RESID], pos=pos, batch_size=batch_size)
    assert found.pos is not None
    assert found.pos.tolist() == wanted
    assert found[RESID].shape == (4, len(wanted), zoo.WIDTH)
    assert torch.allclose(found[RESID], cache[RESID][:, wanted], atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(batch_size=st.integers(-3, 0) | st.just(10**12))
def test_batch_sizes_out_of_range(batch_size: int) -> None:
    if batch_size < 1:
        with pytest.raises(pl.InputError, match="batch_size"):
            pl.collect(MODELS["neox"], X, [RESID], batch_size=batch_size)
    else:
        assert len(pl.collect(MODELS["neox"], X, [RESID], batch_size=batch_size)) == 4


@settings(max_examples=120, deadline=None)
@given(pos=st.one_of(st.integers(-9, 9), st.lists(st.integers(-9, 9), max_size=4)), family=st.sampled_from(FAMILIES))
def test_at_edits_these_positions_and_no_other(pos: Any, family: str) -> None:
    model = MODELS[family]
    if pos == []:
        with pytest.raises(pl.InputError):
            pl.at(pos, lambda t, hook: t)
        return
    hook = (RESID, pl.at(pos, lambda t, hook: torch.zeros_like(t)))
    wanted = chosen(pos)
    if wanted is None:
        with pytest.raises(pl.InputError, match="allowed are"):
            model.run_with_hooks(X, [hook])
        return
    before = model.run_with_cache(X, RESID)[1][RESID]
    with model.hooks([hook]):
        after = model.run_with_cache(X, RESID)[1][RESID]
    rest = [p for p in range(LENGTH) if p not in wanted]
    assert not after[:, wanted].any()
    assert torch.equal(after[:, rest], before[:, rest])


@settings(max_examples=60, deadline=None)
@given(data=st.data(), family=st.sampled_from(("neox", "mamba")))
def test_masks_of_any_pattern_are_used_or_refused(data: st.DataObject, family: str) -> None:
    model = MODELS[family]
    rows, width = data.draw(st.tuples(st.integers(1, 5), st.integers(1, 8)))
    mask = torch.tensor(
        data.draw(st.lists(st.lists(st.booleans(), min_size=width, max_size=width), min_size=rows, max_size=rows))
    )
    if mask.shape != X.shape:
        with pytest.raises(pl.ShapeError, match="attention_mask"):
            pl.collect(model, X, [RESID], attention_mask=mask)
        return
    if family == "mamba" and any("01" in "".join(str(int(real)) for real in row).lstrip("0") for row in mask.tolist()):
        # Its state and its convolution run over padding between real tokens.
        with pytest.raises(pl.InputError, match="padding between real tokens changes"):
            pl.collect(model, X, [RESID], attention_mask=mask.long())
        return
    found = pl.collect(model, X, [RESID], attention_mask=mask.long())
    assert found.mask is not None
    assert torch.equal(found.mask, mask)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_patch_with_any_positions_and_batch_size(data: st.DataObject) -> None:
    model = MODELS[data.draw(st.sampled_from(FAMILIES))]
    pos = data.draw(
        st.one_of(st.integers(-9, 9), st.just("each"), st.lists(st.integers(-9, 9), min_size=1, max_size=3), st.none())
    )
    corrupted = X.clone()
    corrupted[:, 1] = (X[:, 1] + 1) % zoo.VOCAB
    ones = torch.ones(4, dtype=torch.long)
    pairs = pl.PatchPairs(X, corrupted, ones, ones * (LENGTH - 1), torch.tensor([[0, 1]] * 4))
    run = lambda size: pl.patch(model, pairs, [RESID], pos=pos, batch_size=size)  # noqa: E731
    if pos != "each" and chosen(pos) is None:
        with pytest.raises(pl.ProbelensError):
            run(4)
        return
    if isinstance(pos, list) and len({p % LENGTH for p in pos}) < len(pos):
        with pytest.raises(pl.InputError, match="more than once"):
            run(4)
        return
    found, again = run(4), run(data.draw(st.integers(1, 5)))
    assert torch.allclose(found.values, again.values, atol=1e-4), "the batch size changes no number"


@settings(max_examples=80, deadline=None)
@given(data=st.data(), family=st.sampled_from(FAMILIES))
def test_hooks_that_return_anything_are_followed_or_refused(data: st.DataObject, family: str) -> None:
    model = MODELS[family]
    real = (4, LENGTH, zoo.WIDTH)
    shape = data.draw(
        st.sampled_from([real, (4, LENGTH), (1, LENGTH, zoo.WIDTH), (4, LENGTH, 1), (), (0,), (4, 1, zoo.WIDTH)])
    )
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64, torch.float16, torch.int64, torch.bool]))
    other = data.draw(st.sampled_from(["tensor", 0, "text", [1], False]))
    value = torch.zeros(shape, dtype=dtype) if other == "tensor" else other
    if other == "tensor" and shape == real:
        expected = model.run_with_hooks(X, [(RESID, lambda t, hook: torch.zeros_like(t))])
        assert torch.equal(model.run_with_hooks(X, [(RESID, lambda t, hook: value)]), expected)
        return
    with pytest.raises(pl.ShapeError, match="return"):
        model.run_with_hooks(X, [(RESID, lambda t, hook: value)])


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.one_of(
        st.lists(st.lists(st.integers(-3, 40), max_size=4), max_size=3), st.text(max_size=5), st.none(), st.integers(),
        st.floats(), st.dictionaries(st.text(max_size=5), st.integers(), max_size=2),
    )
)  # fmt: skip
def test_anything_as_inputs_of_collect_is_run_or_refused(tokens: Any) -> None:
    # A mapping goes to the model as keywords; what the model itself says about them is its own.
    try:
        found = pl.collect(MODELS["neox"], tokens, [RESID])
    except (pl.InputError, pl.ShapeError):
        return
    assert all(0 <= t < zoo.VOCAB for row in tokens for t in row)
    assert len(found) == len(tokens)


# -- Ctrl-C -----------------------------------------------------------------------------------------


class Interrupting:
    """A hook that counts, and raises at the n-th call."""

    def __init__(self, at: int, error: type[BaseException] = KeyboardInterrupt) -> None:
        self.left, self.error = at, error

    def __call__(self, tensor: Tensor, hook: HookPoint) -> Tensor:
        self.left -= 1
        if self.left < 0:
            raise self.error
        return tensor * 0.5


INTERIOR = {
    "neox": "blocks.1.attn.hook_pattern",
    "mamba": "blocks.1.mixer.hook_ssm_state",
    "lstm-fused": "blocks.1.rnn.hook_c",
}


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError, ValueError])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_interrupt_in_a_hook_leaves_nothing(family: str, error: type[BaseException]) -> None:
    model = MODELS[family]
    for name in (RESID, INTERIOR[family], "blocks.*.hook_resid_post"):
        for when in (0, 1, 2):
            hook = Interrupting(when, error)
            with contextlib.suppress(error):
                model.run_with_hooks(X, [(name, hook)])
            clean(family)
            with pytest.raises(error), model.hooks([(name, Interrupting(0, error))]), model.hooks([(RESID, hook)]):
                model(X)
            clean(family)


def interrupt_in(module: nn.Module, at: int) -> Any:
    """Raise KeyboardInterrupt in the model's own forward, as Ctrl-C would, at its n-th call."""
    left = [at]

    def before(*args: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt

    before.__module__ = "torch"  # part of the model, not a hook of the user's, with which no stream is written
    return module.register_forward_pre_hook(before)


PAIRS_EDIT = (X[:, 1] + 1) % zoo.VOCAB


def work(name: str, model: pl.HookedModel, folder: Path) -> None:
    batch = pl.tasks.Parity().sample(12, length=LENGTH)
    if name == "collect":
        pl.collect(model, X, "layers", batch_size=2)
    elif name == "collect to disk":
        pl.collect(model, X, "layers", out=folder / "acts", batch_size=2)
    elif name == "patch":
        corrupted = X.clone()
        corrupted[:, 1] = PAIRS_EDIT
        ones = torch.ones(4, dtype=torch.long)
        pairs = pl.PatchPairs(X, corrupted, ones, ones * (LENGTH - 1), torch.tensor([[0, 1]] * 4))
        pl.patch(model, pairs, "layers", pos="each", batch_size=2)
    elif name == "ablate":
        spaces = {RESID: pl.subspaces.random(2, zoo.WIDTH, mean=torch.zeros(zoo.WIDTH))}
        pl.ablate(model, batch, spaces, label="state", refit=False, controls=2, batch_size=4)
    elif name == "cache":
        for _ in range(4):
            model.run_with_cache(X)
    elif name == "verify":
        model.verify(X)
    else:
        with model.edit_weights({"blocks.1": torch.zeros_like} if False else {weight_of(model): torch.zeros_like}):
            for _ in range(4):
                model(X)


def weight_of(model: pl.HookedModel) -> str:
    return next(name for name, p in model.module.named_parameters() if p.ndim == 2)


@pytest.mark.parametrize("name", ["collect", "collect to disk", "patch", "ablate", "cache", "verify", "edit_weights"])
@pytest.mark.parametrize("family", FAMILIES)
def test_ctrl_c_in_the_midst_of_a_primitive_leaves_nothing(tmp_path: Path, family: str, name: str) -> None:
    model = MODELS[family]
    weights = {key: value.clone() for key, value in model.module.state_dict().items()}
    target = model.module.get_submodule(model.adapter.blocks[1]) if family != "lstm-fused" else model.module.head
    for at in (0, 1, 3):
        handle = interrupt_in(target, at)  # type: ignore[arg-type]
        interrupted = False
        try:
            work(name, model, tmp_path / str(at))
        except KeyboardInterrupt:
            interrupted = True
        finally:
            handle.remove()
        assert interrupted or at, "the control: the interrupt came"
        clean(family)
        assert all(torch.equal(value, weights[key]) for key, value in model.module.state_dict().items())
    if name == "collect to disk":
        # The same command goes on from what was finished, and gets what an uninterrupted one gets.
        again = pl.collect(model, X, "layers", out=tmp_path / "3" / "acts", batch_size=2)
        whole = pl.collect(model, X, "layers", batch_size=2)
        assert all(torch.equal(again[n], whole[n]) for n in whole.names)


# -- a thousand times -------------------------------------------------------------------------------


def growth(call: Callable[[], Any], n: int) -> int:
    """Bytes of Python objects that n calls leave behind, after a warm-up."""
    for _ in range(20):
        call()
    gc.collect()
    tracemalloc.start()
    try:
        first = tracemalloc.get_traced_memory()[0]
        for _ in range(n):
            call()
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - first
    finally:
        tracemalloc.stop()


def hooked(model: pl.HookedModel) -> None:
    model.run_with_hooks(X[:1, :3], [(RESID, lambda t, hook: t * 2)])


def failing(model: pl.HookedModel) -> None:
    with pytest.raises(ZeroDivisionError):
        model.run_with_hooks(X[:1, :3], [(RESID, lambda t, hook: t / (1 // 0))])


def interior(model: pl.HookedModel) -> None:
    model.run_with_cache(X[:1, :3], [n for n in INTERIOR.values() if n in model.hook_dict])


def misnamed(model: pl.HookedModel) -> None:
    with pytest.raises(pl.UnknownHookError):
        model.run_with_hooks(X, [("blocks.1.hook_resid_pots", lambda t, hook: t)])


def silent(model: pl.HookedModel) -> None:
    with pytest.raises(pl.HookNotFiredError):
        model.run_with_hooks(X[:1, :3], [(RESID, lambda t, hook: t)], stop_at_layer=1)


@pytest.mark.parametrize(
    ("call", "n"), [(hooked, 1000), (failing, 1000), (interior, 200), (silent, 200), (misnamed, 50)],
    ids=lambda value: getattr(value, "__name__", ""),
)  # fmt: skip
def test_many_calls_leave_no_hooks_and_no_memory(call: Callable[[pl.HookedModel], None], n: int) -> None:
    # The recurrent model is the cheapest; what is counted does not depend on the family.
    for family, times in (("lstm-fused", n), ("neox", n // 20)):
        model = MODELS[family]
        left = growth(lambda model=model: call(model), times)  # type: ignore[misc]
        assert left < 30_000 + 20 * times, f"{family}: {left} bytes after {times} calls"
        clean(family)


def test_the_measure_of_growth_notices_a_leak() -> None:
    kept: list[Any] = []
    assert growth(lambda: kept.append(bytearray(200)), 1000) > 30_000 + 20 * 1000


# -- threads ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [RESID, "interior"])
@pytest.mark.parametrize("family", FAMILIES)
def test_threads_have_hooks_of_their_own_on_one_model(family: str, name: str) -> None:
    model = MODELS[family]
    point = INTERIOR[family] if name == "interior" else name
    scales = (0.0, 0.25, 1.0, 3.0, None)
    expected = {
        s: LOGITS[family] if s is None else model.run_with_hooks(X, [(point, lambda t, hook, s=s: t * s)])
        for s in scales
    }
    wrong: list[Any] = []
    start = threading.Barrier(len(scales))

    def work(scale: float | None) -> None:
        try:
            start.wait(10)
            for i in range(12):
                if scale is None:
                    out = model(X)
                elif i % 4 == 3:
                    with contextlib.suppress(ValueError):
                        model.run_with_hooks(X, [(point, Interrupting(0, ValueError))])
                    continue
                else:
                    out = model.run_with_hooks(X, [(point, lambda t, hook: t * scale)])
                if not torch.allclose(out, expected[scale], atol=1e-5):
                    wrong.append(scale)
        except BaseException as err:
            wrong.append(err)

    threads = [threading.Thread(target=work, args=(s,)) for s in scales]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    clean(family)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("family", ["neox", "gpt2", "llama"])
def test_a_hook_of_another_thread_that_comes_amid_a_run_changes_nothing_in_it(family: str, padded: bool) -> None:
    # What the other thread does to this run, without the chance: the tapped attention takes over at block 1, with the
    # mask that was made for the model's own attention before block 0.
    module = zoo.build(family)
    model, tokens = pl.wrap(module), zoo.tokens(3, 12)
    mask = torch.ones_like(tokens)
    mask[:, : 4 * padded] = 0
    want = model(tokens, attention_mask=mask)
    with contextlib.ExitStack() as stack:

        def arrive(*_: Any) -> None:
            stack.enter_context(model.backend("reference"))

        block = module.get_submodule(model.adapter.blocks[1])
        stack.callback(block.register_forward_pre_hook(arrive).remove)
        got = model(tokens, attention_mask=mask)
        assert module.config._attn_implementation == "probelens", "the control: it did take over"
    # A padded position sees nothing, and each kind of attention makes something else of that.
    torch.testing.assert_close(got[:, 4 * padded :], want[:, 4 * padded :], atol=1e-5, rtol=1e-5)


# -- files and folders ------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(
    key=st.one_of(st.text(max_size=24), st.sampled_from(["..", "../x", "/etc", "a/../../b", ".", "abc/", "ABC", "a\0"]))
)
def test_the_name_of_a_cell_cannot_leave_the_run_folder(key: str) -> None:
    store = Store("runs/x")
    try:
        place = store.cell(key)
    except pl.InputError:
        return
    assert place.parent == Path("runs/x/cells")
    assert place.name == key


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.text(max_size=8),
        st.one_of(st.text(), st.integers(), st.floats(allow_nan=False, allow_infinity=False)),
        max_size=4,
    )
)
def test_a_key_is_a_name_that_every_file_system_takes(config: dict[str, Any]) -> None:
    key = cell_key(config)
    assert len(key) == 16
    assert set(key) <= set("0123456789abcdef")
    assert Store("runs/x").cell(key).name == key


def test_the_config_of_a_cell_names_nothing_outside(tmp_path: Path) -> None:
    from grid_cells import square

    from probelens.experiments import run_grid

    names = ["../../../out", "/etc/passwd", "a/b", "..", "\u2603"]
    store = Store(tmp_path / "deep" / "run")
    done = run_grid(square, [{"x": i, "name": name} for i, name in enumerate(names)], store, workers=1)
    assert not done.failed
    found = {p.relative_to(tmp_path).parts[:2] for p in tmp_path.rglob("*") if p.is_file()}
    assert found == {("deep", "run")}
    assert sorted(p.name for p in (store.folder / "cells").iterdir()) == sorted(done.keys)


def test_files_of_activations_are_named_by_number_not_by_site(tmp_path: Path) -> None:
    model = MODELS["neox"]
    pl.collect(model, X, "layers", out=tmp_path / "acts")
    assert all(p.name.startswith(("collect.", "site_")) for p in (tmp_path / "acts").iterdir())
    record = tmp_path / "acts" / "collect.json"
    content = json.loads(record.read_text())
    secret = tmp_path / "secret.npy"
    import numpy as np

    np.save(secret, np.ones((4, LENGTH, zoo.WIDTH), dtype=np.float32))
    content["files"] = dict.fromkeys(content["files"], "../secret.npy")
    record.write_text(json.dumps(content))
    with pytest.raises(pl.StoreError):
        pl.collect(model, X, "layers", out=tmp_path / "acts")


def test_two_processes_on_one_run_folder_leave_complete_rows(tmp_path: Path) -> None:
    here = Path(grid_cells.__file__).parent
    code = (
        f"import sys; sys.path.insert(0, {str(here)!r})\n"
        "from grid_cells import square\nfrom probelens.experiments import Store, run_grid\n"
        f"store = Store({str(tmp_path / 'run')!r})\n"
        "done = run_grid(square, [{'x': i, 'sleep': 0.02} for i in range(40)], store, workers=1)\n"
        "assert not done.failed, done.failed\n"
        "assert len(store.all_rows(done.keys)) == 80\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    processes = [
        subprocess.Popen([sys.executable, "-c", code], env=env, stderr=subprocess.PIPE, text=True) for _ in range(2)
    ]
    ends = [(process.communicate(timeout=120)[1], process.returncode) for process in processes]
    assert 0 in [status for _, status in ends], ends
    # A second that came when the first was done finds its rows; one that came before is refused.
    assert all(status == 0 or "is being written by another run" in err for err, status in ends), ends
    store = Store(tmp_path / "run")
    table = store.all_rows()
    assert sorted(table["x"].tolist()) == sorted([*range(40), *range(40)])
    assert len(store.keys()) == 40
    assert not list((tmp_path / "run").rglob("*.part"))


def test_two_trainings_in_one_folder_leave_a_whole_checkpoint(tmp_path: Path) -> None:
    task = pl.tasks.Parity()
    config = pl.models.FormalConfig.for_task("gru", task, n_layers=1, d_model=8, hidden_size=8)
    train = pl.training.TrainConfig(
        steps=60, batch_size=8, decay_steps=5, length=6, eval_sequences=8, checkpoint_every=2, target_accuracy=None
    )
    wrong: list[BaseException] = []
    ends: list[dict[str, Tensor]] = []

    # Built one after the other: initial weights come from torch's own generator.
    models = [pl.models.build(config) for _ in range(2)]

    def work(model: nn.Module) -> None:
        try:
            pl.training.train(model, task, config=train, checkpoint_dir=tmp_path, progress=False)
            ends.append(model.state_dict())
        except BaseException as err:
            wrong.append(err)

    threads = [threading.Thread(target=work, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    saved = pl.models.load(tmp_path).state_dict()
    for end in ends:
        assert all(torch.equal(value, saved[key]) for key, value in end.items()), "the same run, the same weights"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.safetensors", "train.safetensors"]


# -- code from strangers ----------------------------------------------------------------------------


def test_code_of_a_checkpoint_runs_only_when_asked(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({"model_type": "mine", "auto_map": {"AutoConfig": "mine.C", "AutoModelForCausalLM": "mine.M"}})
    )
    (folder / "mine.py").write_text(
        f"open({str(trace)!r}, 'w').close()\nfrom transformers import PretrainedConfig\n"
        "class C(PretrainedConfig):\n    model_type = 'mine'\n"
    )
    with pytest.raises(pl.InputError, match="trust_remote_code"):
        pl.load(folder)
    assert not trace.exists()
    # The control: asked for, the code does run, so its silence above means something.
    with contextlib.suppress(Exception):
        pl.load(folder, trust_remote_code=True)
    assert trace.exists()


def test_weights_that_are_a_pickle_are_not_executed(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    zoo.build("neox").save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    trace = tmp_path / "trace"

    class Payload:
        def __reduce__(self) -> Any:
            return (open, (str(trace), "w"))

    torch.save({"gpt_neox.embed_in.weight": Payload()}, folder / "pytorch_model.bin")
    with pytest.raises(Exception):  # noqa: B017, PT011
        pl.load(folder)
    assert not trace.exists()
