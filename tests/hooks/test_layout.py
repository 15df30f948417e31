"""Where examples and positions are in what a module is called with, and how often: against plain PyTorch hooks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers
from torch import Tensor, nn

import probelens as pl

V, D, T = 60, 16, 8


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().eval()


def by_hand(module: nn.Module, root: nn.Module, inputs: Tensor, edit: Callable[..., Tensor | None]) -> Tensor:
    """The logits of a run in which plain PyTorch edits what ``module`` returns."""
    with torch.no_grad(), module.register_forward_hook(lambda m, args, out: edit(out)):
        out = root(inputs)
    return out.logits if hasattr(out, "logits") else out


class TimeMajor(nn.Module):
    """Takes and gives (batch, pos); its blocks run (pos, batch, d), PyTorch's default."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, D)
        layer = nn.TransformerEncoderLayer(D, 2, 32)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.unembed = nn.Linear(D, V)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.unembed(self.encoder(self.embed(tokens).transpose(0, 1))).transpose(0, 1)


def time_major(**options: object) -> tuple[nn.Module, pl.HookedModel]:
    module = seeded(TimeMajor)
    return module, pl.wrap(module, blocks="encoder.layers", embed="embed", unembed="unembed", **options)


@pytest.mark.parametrize("shape", [(5, T), (T, T), (2, 3)])
def test_time_major_blocks_are_read_and_edited_position_first(shape: tuple[int, int]) -> None:
    module, model = time_major()
    tokens = torch.randint(V, shape)
    layer = module.get_submodule("encoder.layers.0")
    kept: list[Tensor] = []
    by_hand(layer, module, tokens, lambda out: kept.append(out.transpose(0, 1).clone()))
    _, cache = model.run_with_cache(tokens)
    torch.testing.assert_close(cache["resid_post", 0], kept[0])
    right = by_hand(layer, module, tokens, lambda out: out.index_fill(0, torch.tensor([1]), 0.0))
    with torch.no_grad():
        for edit in (pl.edits.zero(pos=1), pl.at(1, lambda t, hook: torch.zeros_like(t))):
            torch.testing.assert_close(model.run_with_hooks(tokens, [("blocks.0.hook_resid_post", edit)]), right)
        torch.testing.assert_close(model(tokens, stop_at_layer=1), kept[0])
        torch.testing.assert_close(model(kept[0], start_at_layer=1), module(tokens))


def test_collect_and_patch_on_time_major_blocks() -> None:
    module, model = time_major()
    tokens = torch.randint(V, (20, T))
    with torch.no_grad():
        right = module.encoder(module.embed(tokens).transpose(0, 1))[-1]  # type: ignore[operator]
    found = pl.collect(model, tokens, "resid_post", pos=-1, batch_size=8)["resid_post", 1]
    torch.testing.assert_close(found[:, 0], right)
    clean, read = tokens[:6], 7
    corrupted = clean.clone()
    corrupted[:, 2] = (clean[:, 2] + 1) % V
    pairs = pl.PatchPairs(clean, corrupted, torch.full((6,), 2), torch.full((6,), read), torch.tensor([[3, 5]] * 6))
    result = pl.patch(model, pairs, "resid_post")
    for layer in (0, 1):
        block = module.get_submodule(f"encoder.layers.{layer}")
        source: list[Tensor] = []
        by_hand(block, module, clean, lambda out, source=source: source.append(out.clone()))
        for p in range(T):
            at = (torch.arange(T) == p)[:, None, None]
            logits = by_hand(block, module, corrupted, lambda out, at=at, s=source: torch.where(at, s[0], out))
            torch.testing.assert_close(result.values[layer, p], logits[:, read, 3] - logits[:, read, 5])
    assert model.verify(tokens[:3]).ok


def test_a_stated_layout_that_the_model_contradicts_is_refused() -> None:
    _, model = time_major(batch_first=True)
    with pytest.raises(pl.errors.InputError, match=r"examples on axis 1.*batch_first=False"):
        model.run_with_cache(torch.randint(V, (3, T)))
    _, model = time_major(batch_first=False)
    assert model.run_with_cache(torch.randint(V, (3, T)))[1]["resid_post", 0].shape == (3, T, D)


class Flat(nn.Module):
    """A block whose inner layer gets one axis of examples and positions, examples first or positions first."""

    def __init__(self, by_batch: bool) -> None:
        super().__init__()
        self.by_batch = by_batch
        self.embed, self.blocks = nn.Embedding(V, D), nn.ModuleList([nn.Linear(D, D), nn.Linear(D, D)])
        self.unembed = nn.Linear(D, V)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + torch.arange(tokens.shape[1])[:, None].float().sin()
        x = x if self.by_batch else x.transpose(0, 1)
        for block in self.blocks:
            x = x + block(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        return self.unembed(x if self.by_batch else x.transpose(0, 1))


@pytest.mark.parametrize("by_batch", [True, False])
def test_examples_and_positions_on_one_axis_are_told_apart(by_batch: bool) -> None:
    module = seeded(lambda: Flat(by_batch))
    model = pl.wrap(module, blocks="blocks", embed="embed", unembed="unembed")
    tokens = torch.randint(V, (3, 5))

    def edit(out: Tensor) -> Tensor:
        out = out.clone().view(3, 5, D) if by_batch else out.clone().view(5, 3, D)
        out[:, 2] = 0 if by_batch else out[:, 2]
        if not by_batch:
            out[2] = 0
        return out.flatten(0, 1)

    right = by_hand(module.get_submodule("blocks.0"), module, tokens, edit)
    with torch.no_grad():
        found = model.run_with_hooks(tokens, [("blocks.0.hook_resid_post", pl.edits.zero(pos=2))])
    torch.testing.assert_close(found, right)
    assert pl.collect(model, tokens, "blocks.0.hook_out")["blocks.0.hook_out"].shape == (3, 5, D)


def test_experts_of_a_mixture_are_edited_at_positions() -> None:
    config = transformers.MixtralConfig(
        vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4,
    )  # fmt: skip
    module = seeded(lambda: transformers.MixtralForCausalLM(config))
    model, tokens = pl.wrap(module), torch.randint(V, (3, T))
    name = "model.layers.1.mlp.experts"

    def edit(out: Tensor) -> Tensor:
        out = out.view(3, T, -1).clone()
        out[:, 2] = 0
        return out.flatten(0, 1)

    right = by_hand(module.get_submodule(name), module, tokens, edit)
    with torch.no_grad():
        found = model.run_with_hooks(tokens, [(f"{name}.hook_out", pl.edits.zero(pos=2))])
    torch.testing.assert_close(found, right)


class Shuffled(nn.Module):
    """A block that gets examples and positions in an order that nothing tells: longest first, say."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks, self.unembed = nn.Embedding(V, D), nn.ModuleList([nn.Linear(D, D)]), nn.Linear(D, V)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        order = x.flatten(0, 1).sum(-1).argsort()
        y = torch.empty_like(x.flatten(0, 1))
        y[order] = self.blocks[0](x.flatten(0, 1)[order])
        return self.unembed(y.view_as(x))


def test_what_can_not_be_told_apart_is_refused() -> None:
    model = pl.wrap(seeded(Shuffled), blocks="blocks", embed="embed", unembed="unembed")
    tokens = torch.randint(V, (3, 5))
    with pytest.raises(pl.errors.ShapeError, match="mixed on one axis"):
        model.run_with_hooks(tokens, [("blocks.0.hook_resid_post", pl.edits.zero(pos=2))])
    with pytest.raises(pl.errors.ShapeError, match=r"blocks\.0\.hook_resid_post.*batch"):
        pl.collect(model, tokens, "blocks.0.hook_resid_post")


# -- several calls of one module -----------------------------------------------------------------------------------


class Shared(nn.Module):
    """Three blocks with one activation function between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.unembed, act = nn.Embedding(V, D), nn.Linear(D, V), nn.ReLU()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(D, D), act, nn.Linear(D, D)) for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.unembed(x)


def test_each_call_of_a_shared_module_has_a_name_and_the_bare_name_is_refused() -> None:
    module = seeded(Shared)
    model = pl.wrap(module, blocks="blocks", embed="embed", unembed="unembed")
    tokens, name = torch.randint(V, (2, 5)), "blocks.0.1.hook_out"
    act = module.get_submodule("blocks.0.1")
    calls: list[Tensor] = []
    by_hand(act, module, tokens, lambda out: calls.append(out.clone()))
    for refused in (lambda: model.run_with_cache(tokens, name), lambda: pl.collect(model, tokens, name)):
        with pytest.raises(
            pl.errors.InputError, match=r"3 times.*blocks\.0\.1\.hook_out#0' to 'blocks\.0\.1\.hook_out#2"
        ):
            refused()
    _, cache = model.run_with_cache(tokens, [f"{name}#{k}" for k in range(3)])
    for k, right in enumerate(calls):
        torch.testing.assert_close(cache[f"{name}#{k}"], right)
        reached: list[int] = []

        def zero(out: Tensor, k: int = k, reached: list[int] = reached) -> Tensor:
            reached.append(1)
            return out * 0 if len(reached) == k + 1 else out

        with torch.no_grad():
            found = model.run_with_hooks(tokens, [(f"{name}#{k}", pl.edits.zero())])
        torch.testing.assert_close(found, by_hand(act, module, tokens, zero))
    with pytest.raises(pl.HookNotFiredError, match="never comes"):
        model.run_with_cache(tokens, f"{name}#3")
    report = model.verify(tokens, [name, f"{name}#1"])
    assert [row["ok"] for row in report.rows] == [False, True]
    assert "3 times" in report.rows[0]["problem"]


class Stepped(nn.Module):
    """A recurrent layer or cell that a loop steps through the sequence."""

    def __init__(self, cell: type[nn.Module]) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(V, D), nn.Linear(D, V)
        self.rnn = cell(D, D, batch_first=True) if cell is nn.LSTM else cell(D, D)

    def forward(self, tokens: Tensor) -> Tensor:
        state, out = None, []
        for t in range(tokens.shape[1]):
            if isinstance(self.rnn, nn.LSTM):
                y, state = self.rnn(self.embed(tokens[:, t : t + 1]), state)
                y = y[:, 0]
            else:
                state = self.rnn(self.embed(tokens[:, t]), state)
                y = state[0] if isinstance(state, tuple) else state
            out.append(self.head(y))
        return torch.stack(out, 1)


@pytest.mark.parametrize("cell", [nn.LSTM, nn.LSTMCell, nn.GRUCell])
def test_steps_of_a_loop_are_positions(cell: type[nn.Module]) -> None:
    module = seeded(lambda: Stepped(cell))
    options = {} if cell is nn.LSTM else {"blocks": ["rnn"], "embed": "embed", "unembed": "head"}
    model, tokens = pl.wrap(module, **options), torch.randint(V, (3, 6))
    steps: list[Tensor] = []
    rnn = module.get_submodule("rnn")

    def first(out: Tensor | tuple[Tensor, ...]) -> Tensor:
        return out[0] if isinstance(out, tuple) else out

    by_hand(rnn, module, tokens, lambda out: steps.append(first(out).clone()))
    right = torch.stack([step.view(3, D) for step in steps], 1)
    _, cache = model.run_with_cache(tokens)
    torch.testing.assert_close(cache["resid_post", 0], right)
    torch.testing.assert_close(pl.collect(model, tokens, "layers", pos=[1, 4])["resid_post", 0], right[:, [1, 4]])
    assert all(value.shape[:2] == (3, 6) for value in cache.values())
    assert model.verify(tokens).ok
    for p in (0, 3):
        count: list[int] = []

        def zero(out: Tensor | tuple[Tensor, ...], p: int = p, count: list[int] = count) -> object:
            count.append(1)
            if len(count) != p + 1:
                return None
            return (out[0] * 0, *out[1:]) if isinstance(out, tuple) else out * 0

        want = by_hand(rnn, module, tokens, zero)  # type: ignore[arg-type]
        with torch.no_grad():
            for edit in (pl.edits.zero(pos=p), pl.at(p, lambda t, hook: torch.zeros_like(t)), pl.edits.zero(pos=p - 6)):
                found = model.run_with_hooks(tokens, [("blocks.0.hook_resid_post", edit)])
                torch.testing.assert_close(found, want)


def test_the_cell_state_of_a_stepped_lstm_is_that_of_one_call() -> None:
    module = seeded(lambda: Stepped(nn.LSTM))
    whole = nn.LSTM(D, D, batch_first=True)
    whole.load_state_dict(module.get_submodule("rnn").state_dict())
    tokens = torch.randint(V, (3, 6))
    alone = pl.wrap(whole)
    _, right = alone.run_with_cache(module.get_submodule("embed")(tokens).detach())
    model = pl.wrap(module)
    _, found = model.run_with_cache(tokens)
    for point in ("hook_c", "hook_h", "hook_gate_f"):
        torch.testing.assert_close(found[f"blocks.0.rnn.{point}"], right[f"blocks.0.rnn.{point}"])
    # An edit of the cell state at one step, beside the same one in a single call.
    edit = [("blocks.0.rnn.hook_c", pl.edits.zero(pos=2))]
    x = module.get_submodule("embed")(tokens).detach()
    with torch.no_grad():
        want = module.get_submodule("head")(alone.run_with_hooks(x, edit))
        torch.testing.assert_close(model.run_with_hooks(tokens, edit), want)


# -- positions are those of the sequence ---------------------------------------------------------------------------


def generating(kind: str) -> nn.Module:
    sizes = {"vocab_size": V, "bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0}
    if kind == "gpt2":
        config: object = transformers.GPT2Config(n_layer=3, n_embd=32, n_head=4, n_positions=64, **sizes)
        return seeded(lambda: transformers.GPT2LMHeadModel(config))
    if kind == "mamba":
        config = transformers.MambaConfig(hidden_size=32, num_hidden_layers=2, **sizes)
        return seeded(lambda: transformers.MambaForCausalLM(config))
    config = transformers.RwkvConfig(hidden_size=32, num_hidden_layers=2, **sizes)
    return seeded(lambda: transformers.RwkvForCausalLM(config))


def generated(model: pl.HookedModel, tokens: Tensor, edit: object, cached: bool, **more: object) -> Tensor:
    with model.hooks([("blocks.0.hook_resid_post", edit)]):  # type: ignore[list-item]
        out = model.module.generate(  # type: ignore[operator]
            tokens, max_new_tokens=4, do_sample=False, use_cache=cached, output_logits=True,
            return_dict_in_generate=True, **more,
        )  # fmt: skip
    return torch.stack(out.logits)


@pytest.mark.parametrize("kind", ["gpt2", "mamba"])
def test_positions_while_generating_with_a_cache_are_those_of_the_sequence(kind: str) -> None:
    model, tokens, v = pl.wrap(generating(kind)), torch.randint(1, V, (2, 6)), torch.randn(32) * 3
    plain = generated(model, tokens, pl.edits.add(v * 0), True)
    for edit in (
        pl.edits.add(v, pos=0), pl.at(0, lambda t, hook: t + v), pl.edits.add(v, pos=slice(0, 2)), pl.edits.add(v, pos=[3, 5]),
        pl.edits.add(v, pos=torch.tensor([2, 4])), pl.at(torch.tensor([2, 4]), lambda t, hook: t + v),
    ):  # fmt: skip
        right = generated(model, tokens, edit, False)
        torch.testing.assert_close(generated(model, tokens, edit, True), right, atol=1e-4, rtol=1e-4)
        assert (right - plain).abs().max() > 5e-4


def test_last_while_generating_is_the_last_token_of_each_step() -> None:
    model, tokens, v = pl.wrap(generating("gpt2")), torch.randint(1, V, (2, 6)), torch.randn(32) * 3
    block = model.module.get_submodule("transformer.h.0")

    def by_step(m: nn.Module, args: object, out: Tensor) -> Tensor:
        out = out.clone()
        out[:, -1] += v
        return out

    with block.register_forward_hook(by_step):
        right = generated(model, tokens, pl.edits.add(v * 0), True)
    for edit in (pl.edits.add(v, pos="last"), pl.edits.add(v, pos=-1), pl.at("last", lambda t, hook: t + v)):
        torch.testing.assert_close(generated(model, tokens, edit, True), right)


def test_a_state_that_does_not_say_where_it_is_is_refused() -> None:
    model, tokens = pl.wrap(generating("rwkv")), torch.randint(1, V, (2, 6))
    with pytest.raises(pl.errors.InputError, match="how many positions came before"):
        generated(model, tokens, pl.edits.zero(pos=0), True)
    assert generated(model, tokens, pl.edits.scale(0.5), True).shape == (4, 2, V)
    assert not model.has_hooks()


@pytest.mark.parametrize("side", ["left", "right"])
def test_last_is_the_last_real_token_by_the_mask_of_the_run(side: str) -> None:
    model, tokens, last = pl.wrap(generating("gpt2")), torch.randint(1, V, (3, 6)), torch.tensor([5, 2, 3])
    if side == "left":
        mask = (torch.arange(6) >= torch.tensor([0, 3, 2])[:, None]).long()
        last = torch.full((3,), 5)
    else:
        mask = (torch.arange(6) <= last[:, None]).long()
    _, whole = model.run_with_cache(tokens, "resid_post", attention_mask=mask)
    right = whole["resid_post", 0][torch.arange(3), last]
    _, found = model.run_with_cache(tokens, "resid_post", attention_mask=mask, pos_slice="last")
    torch.testing.assert_close(found["resid_post", 0][:, 0], right)
    acts = pl.collect(model, {"input_ids": tokens, "attention_mask": mask}, "resid_post", pos="last")
    torch.testing.assert_close(acts["resid_post", 0][:, 0], right)
    if side == "right":
        with pytest.raises(pl.errors.ProbelensError, match="padding"):
            pl.collect(model, {"input_ids": tokens, "attention_mask": mask}, "resid_post", pos=-1)
    v = torch.randn(32) * 3

    def by_example(out: Tensor, hook: object) -> Tensor:
        out = out.clone()
        out[torch.arange(3), last] += v
        return out

    with torch.no_grad():
        want = model.run_with_hooks(tokens, [("blocks.0.hook_resid_post", by_example)], attention_mask=mask)
        for edit in (pl.edits.add(v, pos="last"), pl.at("last", lambda t, hook: t + v), pl.edits.add(v, pos=last)):
            got = model.run_with_hooks(tokens, [("blocks.0.hook_resid_post", edit)], attention_mask=mask)
            torch.testing.assert_close(got, want)
    for wrong in (torch.tensor([1, 2]), torch.tensor([1, 2, 3, 4])):
        for call in (
            lambda wrong=wrong: model.run_with_cache(tokens, "resid_post", pos_slice=wrong),
            lambda wrong=wrong: model.run_with_hooks(tokens, [("blocks.0.hook_resid_post", pl.edits.zero(pos=wrong))]),
            lambda wrong=wrong: model.run_with_hooks(
                tokens, [("blocks.0.hook_resid_post", pl.at(wrong, lambda t, hook: t))]
            ),
            lambda wrong=wrong: pl.collect(model, tokens, "resid_post", pos=wrong),
        ):
            with pytest.raises(pl.errors.ShapeError, match="examples"):
                call()
