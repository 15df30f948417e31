"""Trials: asked once, remembered while the model is the same, forgotten when anything in it is exchanged."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import zoo
from torch import Tensor, nn

import probelens as pl
from probelens.hooks.inputs import reads_both_ways
from probelens.hooks.trials import Untried, agree, can_start_at, fingerprint, remember, remembered


class Around(nn.Module):
    """A block that also adds what the embedding gave: something goes around the blocks."""

    def __init__(self, inner: nn.Module, embedding: nn.Module) -> None:
        super().__init__()
        self.inner, self.seen = inner, [torch.zeros(())]
        embedding.register_forward_hook(lambda module, args, out: self.seen.__setitem__(0, out))

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.inner(x, *args, **kwargs) + self.seen[0]


class Net(nn.Module):
    """Three blocks whose readout also reads the embedding, or doesn't."""

    def __init__(self, around: bool) -> None:
        super().__init__()
        self.e = nn.Embedding(60, 16)
        self.u = nn.Linear(32 if around else 16, 60)
        self.ls = nn.ModuleList([nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(3)])

    def forward(self, tokens: Tensor) -> Tensor:
        e = h = self.e(tokens)
        for layer in self.ls:
            h = layer(h)
        return self.u(torch.cat([h, e], -1) if self.u.in_features == 32 else h)


def test_an_exchanged_module_is_tried_again() -> None:
    model, x = pl.wrap(zoo.build("gpt2")), zoo.tokens(4, 6)
    resid = model(x, stop_at_layer=1)
    assert model.can_start_at(1)
    assert torch.allclose(model(resid, start_at_layer=1), model(x), atol=1e-5)
    model.module.transformer.h[2] = Around(model.module.transformer.h[2], model.module.transformer.wte)
    assert not model.can_start_at(1)
    with pytest.raises(pl.InputError, match="start_at_layer=1.*something goes around the blocks"):
        model(resid, start_at_layer=1)


def exchange_module(module: Any) -> None:
    module.transformer.h[1].mlp.act = nn.Tanh()


def exchange_forward(module: Any) -> None:
    module.transformer.h[1].forward = lambda *args, **kwargs: None


def exchange_method(module: Any) -> None:
    kind = type(module.transformer.h[1].mlp)
    module.transformer.h[1].mlp.__class__ = type(kind.__name__, (kind,), {})


def add_hook(module: Any) -> None:
    module.transformer.h[1].register_forward_hook(lambda *args: None)


def exchange_parameter(module: Any) -> None:
    module.transformer.h[1].ln_1.weight = nn.Parameter(module.transformer.h[1].ln_1.weight.detach().clone())


def write_parameter(module: Any) -> None:
    with torch.no_grad():
        module.transformer.h[1].ln_1.weight.mul_(2)


def write_buffer(module: Any) -> None:
    module.register_buffer("extra", torch.zeros(2))


def other_dtype(module: Any) -> None:
    module.double()


def number(module: Any) -> None:
    module.transformer.h[1].ln_1.eps = 0.1


def setting(module: Any) -> None:
    module.config.scale_attn_weights = False


CHANGES = [
    exchange_module, exchange_forward, exchange_method, add_hook, exchange_parameter, write_parameter, write_buffer,
    other_dtype, number, setting,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_whatever_is_exchanged_is_noticed(change: Callable[[Any], None]) -> None:
    module = zoo.build("gpt2")
    asked: list[int] = []

    def ask() -> None:
        remembered(module, module, "what", lambda: asked.append(1) or True)

    ask()
    ask()
    assert len(asked) == 1, "the control: nothing was exchanged"
    before = fingerprint(module)
    assert fingerprint(module) == before
    change(module)
    assert fingerprint(module) != before
    ask()
    assert len(asked) == 2


def test_runs_hooks_of_the_librarys_own_and_the_training_mode_exchange_nothing() -> None:
    model, x = pl.wrap(zoo.build("gpt2")), zoo.tokens()
    before = fingerprint(model.module)
    model.run_with_cache(x)
    model.module.train()
    with model.hooks([("blocks.*.hook_resid_post", lambda tensor, hook: None)]):
        model(x)
        assert fingerprint(model.module) == before


def test_a_patched_method_of_a_class_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    module = zoo.build("gpt2")
    before = fingerprint(module)
    monkeypatch.setattr(type(module.transformer.h[1].mlp), "forward", lambda self, x: x)
    assert fingerprint(module) != before


def test_an_identity_that_another_module_gets_is_no_identity() -> None:
    holder = nn.Sequential(nn.Identity())
    before = fingerprint(holder)
    for _ in range(50):  # a freed address is soon given again
        holder[0] = nn.Identity()
        assert fingerprint(holder) != before


def test_the_memory_keeps_no_model_alive_and_copies_start_anew() -> None:
    model = pl.wrap(zoo.build("gpt2"))
    assert model.can_start_at(1)
    pl.patch(
        model,
        pl.PatchPairs(
            zoo.tokens(2, 12), zoo.tokens(2, 12).flip(0), torch.tensor([0, 0]), torch.tensor([11, 11]),
            torch.tensor([[1, 2]] * 2),
        ),
    )  # fmt: skip
    module = zoo.build("lstm")
    remember(module, module, "what", "answer")
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert remembered(twin, twin, "what", lambda: "anew") == "anew"
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_what_random_tokens_do_not_run_is_tried_on_the_callers_inputs() -> None:
    torch.manual_seed(0)
    x = torch.randint(60, (4, 8))
    for around in (True, False):
        # Without embed= nobody knows the vocabulary.
        model = pl.wrap(Net(around).eval(), blocks="ls", unembed="u")
        resid = model(x, stop_at_layer=1)
        with pytest.raises(Untried):
            can_start_at(model, 1)
        assert not model.can_start_at(1), "untried is not safe"
        with pytest.raises(pl.InputError, match=r"could not be tried.*Call model\.can_start_at\(1, inputs\)"):
            model(resid, start_at_layer=1)
        assert model.can_start_at(1, x) is not around
        if around:
            with pytest.raises(pl.InputError, match="something goes around"):
                model(resid, start_at_layer=1)
        else:
            assert torch.allclose(model(resid, start_at_layer=1), model(x), atol=1e-6)


@pytest.mark.parametrize("around", [True, False])
def test_patching_a_model_that_random_tokens_do_not_run_equals_patching_by_hand(around: bool) -> None:
    torch.manual_seed(0)
    net = Net(around).eval()
    x = torch.randint(60, (4, 8))
    y = x.clone()
    y[:, 2] = (x[:, 2] + 1) % 60
    pairs = pl.PatchPairs(x, y, torch.full((4,), 2), torch.full((4,), 7), torch.tensor([[3, 5]] * 4))
    found = pl.patch(pl.wrap(net, blocks="ls", unembed="u"), pairs, "resid_post", pos=[2, 7])
    assert (found.path == "full") is around
    kept: list[Tensor] = []
    with torch.no_grad():
        handle = net.ls[1].register_forward_hook(lambda module, args, out: kept.append(out.clone()))
        net(x)
        handle.remove()
        where = (torch.arange(8) == 2)[None, :, None]
        handle = net.ls[1].register_forward_hook(lambda module, args, out: torch.where(where, kept[0], out))
        logits = net(y)[:, 7]
        handle.remove()
    assert torch.allclose(found.values[1, 0], logits[:, 3] - logits[:, 5], atol=1e-5)


class Stateful(nn.Module):
    def __init__(self, noisy: bool = False) -> None:
        super().__init__()
        self.e, self.u = nn.Embedding(60, 16), nn.Linear(16, 60)
        self.rnn = nn.LSTM(16, 16, batch_first=True)
        self.noisy, self.h = noisy, None

    def forward(self, tokens: Tensor) -> Tensor:
        if self.noisy:
            return self.u(torch.dropout(self.rnn(self.e(tokens))[0], 0.3, True))
        h = self.h if self.h is not None and self.h[0].shape[1] == len(tokens) else None
        out, self.h = self.rnn(self.e(tokens), h)
        return self.u(out)


@pytest.mark.parametrize("noisy", [True, False])
def test_runs_of_a_model_that_answers_otherwise_each_time_are_not_compared(noisy: bool) -> None:
    x = zoo.tokens(2, 12)
    pairs = pl.PatchPairs(x, x.flip(0), torch.tensor([0, 0]), torch.tensor([11, 11]), torch.tensor([[1, 2]] * 2))
    with pytest.raises(pl.InputError, match="other outputs for the same inputs"):
        pl.patch(pl.wrap(Stateful(noisy).eval()), pairs, "resid_post")
    assert pl.patch(pl.wrap(zoo.build("lstm")), pairs, "resid_post").values.isfinite().all()


class Tagger(nn.Module):
    """Reads both ways, takes a mask, and heeds it or not."""

    def __init__(self, heeds: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 16)
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)])
        self.head, self.heeds = nn.Linear(16, 12), heeds

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        hidden = None if attention_mask is None or not self.heeds else attention_mask == 0
        return self.head(self.layers[0](self.embedding(x), src_key_padding_mask=hidden))


@pytest.mark.parametrize("known", [True, False])
def test_a_mask_that_a_model_which_reads_both_ways_ignores_is_refused(known: bool) -> None:
    torch.manual_seed(0)
    x, mask = torch.randint(1, 12, (4, 9)), torch.ones(4, 9, dtype=torch.long)
    mask[:2, 6:] = 0
    options = {"blocks": "layers", "unembed": "head", **({"embed": "embedding"} if known else {})}
    deaf, good = (pl.wrap(Tagger(heeds).eval(), **options) for heeds in (False, True))
    for run in (lambda m: m(x, attention_mask=mask), lambda m: m({"x": x}, attention_mask=mask)):
        with pytest.raises(pl.InputError, match="padding on the right.*although the mask is given"):
            run(deaf)
        with torch.no_grad():
            assert torch.allclose(run(good)[:1, :6], good(x[:1, :6]), atol=1e-5)
    assert torch.equal(deaf(x), deaf(x, attention_mask=torch.ones_like(mask))), "the control: nothing is padded"
    assert reads_both_ways(deaf, x)


class Alone(nn.Module):
    """Skips the mask for a batch of one, as some mixers of transformers 5.13 do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 16)
        self.layers = nn.ModuleList([nn.GRU(16, 16, batch_first=True)])
        self.head = nn.Linear(16, 12)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        e = self.embedding(x)
        if attention_mask is None or len(x) == 1:
            return self.head(self.layers[0](e)[0])
        out = torch.zeros(*x.shape, 16)
        for row, real in enumerate(attention_mask.bool()):
            out[row, real] = self.layers[0](e[row, real][None])[0][0]
        return self.head(out)


def test_what_holds_for_several_sequences_is_tried_again_for_one() -> None:
    torch.manual_seed(0)
    model = pl.wrap(Alone().eval(), blocks="layers", embed="embedding", unembed="head")
    x, mask = torch.randint(1, 12, (3, 9)), torch.ones(3, 9, dtype=torch.long)
    mask[:, :3] = 0
    with torch.no_grad():
        assert torch.allclose(model(x, attention_mask=mask)[:, 3:], model(x[:, 3:]), atol=1e-5)
        with pytest.raises(pl.InputError, match="padding before real tokens"):
            model(x[:1], attention_mask=mask[:1])


@pytest.mark.parametrize(
    ("dtype", "rounding", "fault"),
    [(torch.float64, 1e-6, 1e-3), (torch.float32, 1e-5, 1e-3), (torch.bfloat16, 1e-2, 0.2), (torch.float16, 1e-3, 0.2)],
)
def test_a_comparison_allows_the_rounding_of_the_dtype_and_no_more(
    dtype: torch.dtype, rounding: float, fault: float
) -> None:
    x = torch.linspace(-3, 3, 50, dtype=torch.float64)
    off = torch.zeros_like(x)
    off[7] = 3
    assert agree((x + rounding * off).to(dtype), x.to(dtype))
    assert not agree((x + fault * off).to(dtype), x.to(dtype))
    assert not agree((x + 2e-5 * off).float(), x.float(), bits=6)
    assert agree((x + 1e-2 * off).float(), x.float(), torch.bfloat16)
    assert not agree((x + 1e-2 * off).float(), x.float())
    infinite = x.to(dtype).clone()
    infinite[0] = -torch.inf
    assert agree(infinite.clone(), infinite)
    assert not agree(x.to(dtype), infinite)
    assert not agree(x.to(dtype)[:5], x.to(dtype))
    assert not agree(x.to(dtype) * torch.nan, x.to(dtype))


class Remembers(nn.Module):
    """Keeps its hidden state between calls, or draws random numbers in evaluation mode."""

    def __init__(self, noisy: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.noisy, self.state, self.seen = noisy, None, list[int]()
        self.embed, self.rnn, self.unembed = nn.Embedding(60, 16), nn.LSTM(16, 16, batch_first=True), nn.Linear(16, 60)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out, state = self.rnn(self.embed(tokens), None if self.noisy else self.state)
        if self.noisy:
            return self.unembed(torch.dropout(out, 0.3, True))
        self.state = tuple(part.detach() for part in state)
        self.seen.append(len(tokens))
        self.count += 1
        return self.unembed(out)


@pytest.mark.parametrize(("noisy", "cause"), [(False, "keeps state between calls, in state"), (True, "dropout")])
def test_runs_that_can_not_be_compared_are_refused_with_the_cause_and_the_state_is_put_back(
    noisy: bool, cause: str
) -> None:
    module = Remembers(noisy).eval()
    model, tokens = pl.wrap(module), torch.randint(1, 60, (4, 8))
    other = tokens.clone()
    other[:, 5] = tokens[:, 5] % 59 + 1
    pairs = pl.PatchPairs(tokens, other, torch.full((4,), 5), torch.full((4,), 7), torch.tensor([[3, 5]] * 4))
    random = torch.random.get_rng_state()
    for _ in range(2):
        for call in (lambda: pl.patch(model, pairs, "resid_post"), lambda: pl.collect(model, tokens)):
            with pytest.raises(pl.errors.InputError, match=cause):
                call()
        assert module.state is None
        assert module.seen == []
        assert module.count.item() == 0
    assert torch.equal(torch.random.get_rng_state(), random)
    # A run of the caller's own leaves what it leaves.
    model(tokens)
    assert module.noisy or (module.state is not None and module.seen == [4])
