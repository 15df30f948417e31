"""Patching of any inputs and outputs, with positions, masks and answers of each side, against plain torch hooks."""

from __future__ import annotations

import dataclasses
from typing import Any

import anything
import pytest
import torch
import transformers as tf
from anything import Case
from torch import Tensor

import probelens as pl
from probelens.tasks.examples import Examples

SITE = "blocks.0.hook_resid_post"
METRICS = {
    "series": "value",
    "pictures": "logit_diff",
    "embeddings": "logit_diff",
    "packed": "logit_diff",
    "classifier": "kl",
}


def pairs_of(case: Case, n: int = 7) -> pl.PatchPairs:
    """Pairs of neighbouring examples, of one length, with the model's own answers."""
    whole = case.batch.examples
    if "lengths" in whole.batched:
        lengths = whole.batched["lengths"]
        order = [i for k in (5, 6) for i in (lengths == k).nonzero().flatten().tolist()[:8]]
        first, second = order[0::2][:n], order[1::2][:n]
    else:
        first, second = list(range(n)), list(range(n, 2 * n))
    clean, corrupted = whole.part(first), whole.part(second)
    by_position = METRICS[case_name(case)] == "logit_diff" and case.batch.labels[case.target].ndim == 2
    read: Any = None
    if by_position:
        read = whole.batched["lengths"][first] - 1 if "lengths" in whole.batched else -1
    answers = None
    if METRICS[case_name(case)] == "logit_diff":
        answers = torch.tensor([[0, 1]] * len(first))
    return pl.PatchPairs(clean.inputs, corrupted.inputs, None, read, answers)


def case_name(case: Case) -> str:
    return next(name for name in anything.NAMES if anything.case(name) is case)


def run(case: Case, inputs: Any) -> Tensor:
    with torch.no_grad():
        return case.read(case.module(**inputs) if isinstance(inputs, dict) else case.module(inputs))


def by_hand(case: Case, pairs: pl.PatchPairs, pos: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """The metric clean, corrupted and patched at a site, one pair at a time, with a hook on the user's module."""
    found = []
    for i in range(len(pairs)):
        kept: list[Any] = []
        clean, corrupted = (Examples(side).rows([i]) for side in (pairs.clean, pairs.corrupted))
        module = case.module.get_submodule(case.last)
        handle = module.register_forward_hook(lambda m, a, out, kept=kept: kept.append(out))
        outs = [run(case, clean), run(case, corrupted)]
        handle.remove()

        def put(m: Any, args: Any, out: Any, kept: list[Any] = kept) -> Any:
            source, mine = (x[0] if isinstance(x, tuple) and not hasattr(x, "data") else x for x in (kept[0], out))
            if isinstance(out, tuple) and not isinstance(out[0], Tensor):
                source, mine = kept[0][0].data[None], out[0].data[None]
            new = mine.clone()
            new[:, slice(None) if pos is None else pos] = source[:, slice(None) if pos is None else pos]
            if isinstance(out, tuple) and not isinstance(out[0], Tensor):
                return (
                    torch.nn.utils.rnn.pack_padded_sequence(new, torch.tensor([new.shape[1]]), batch_first=True),
                    *out[1:],
                )
            return (new, *out[1:]) if isinstance(out, tuple) else new

        handle = module.register_forward_hook(put)
        outs.append(run(case, corrupted))
        handle.remove()
        metric, read = METRICS[case_name(case)], pairs.read_pos
        if read is not None:
            outs = [out[:, int(read[i])] for out in outs]
        if metric == "value":
            found.append(torch.cat(outs))
        elif metric == "logit_diff":
            found.append(torch.cat([out[:, 0] - out[:, 1] for out in outs]))
        else:
            logs = [out.log_softmax(-1) for out in outs]
            found.append(torch.cat([(logs[0].exp() * (logs[0] - log)).sum(-1) for log in logs]))
    clean, corrupted, patched = torch.stack(found, 1)
    return clean, corrupted, patched


@pytest.mark.parametrize("name", anything.NAMES)
@pytest.mark.parametrize("pos", [None, 1])
def test_a_patch_is_what_a_hook_on_the_module_does(name: str, pos: int | None) -> None:
    case = anything.case(name)
    pairs = pairs_of(case)
    found = pl.patch(case.model, pairs, case.site, pos, metric=METRICS[name], batch_size=3)
    clean, corrupted, patched = by_hand(case, pairs, pos)
    assert torch.allclose(found.clean, clean, atol=1e-4)
    assert torch.allclose(found.corrupted, corrupted, atol=1e-4)
    assert torch.allclose(found.values[0, 0], patched, atol=1e-4)
    assert (patched - corrupted).abs().max() > 1e-3, "control: the patch changes something"
    if pos is None:
        assert torch.allclose(found.recovery(correct_only=False), torch.ones(1, 1), atol=1e-3)


@pytest.mark.parametrize("name", ["series", "embeddings", "packed", "classifier"])
def test_attribution_of_a_small_change_is_the_patch(name: str) -> None:
    case = anything.case(name)
    pairs = pairs_of(case)
    main, metric = pairs.sides[0].main, METRICS[name] if name != "classifier" else lambda out: out[:, 0]
    if not main.is_floating_point():
        estimate = pl.attribute(case.model, pairs, case.site, None, metric=metric, batch_size=3)
        assert estimate.values.shape == (1, 1, len(pairs))
        assert bool(estimate.values.isfinite().all())
        return
    near = pairs.sides[0].map(lambda x: x + 1e-3 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0)))
    close = pl.PatchPairs(pairs.clean, near, None, pairs.read_pos, pairs.answers)
    exact, estimate = (f(case.model, close, case.site, 2, metric=metric) for f in (pl.patch, pl.attribute))
    change, guess = exact.values[0, 0] - exact.corrupted, estimate.values[0, 0] - estimate.corrupted
    assert (change - guess).abs().max() < 0.05 * change.abs().max()


# -- language models ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gpt2() -> Any:
    torch.manual_seed(0)
    sizes = {
        "n_layer": 2,
        "n_embd": 32,
        "n_head": 4,
        "vocab_size": 60,
        "n_positions": 24,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    module = tf.GPT2LMHeadModel(tf.GPT2Config(**sizes)).eval()
    with torch.no_grad():
        for p in module.transformer.parameters():
            p.mul_(3) if p.ndim == 2 else None
    return module


def tokens(n: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(1, 60, (n, length), generator=torch.Generator().manual_seed(seed))


def test_prompts_of_different_lengths_have_a_mask_each(gpt2: Any) -> None:
    model, long, short = pl.wrap(gpt2), tokens(4, 8), tokens(4, 6, 1)
    padded = torch.cat([torch.zeros(4, 2).long(), short], 1)
    mask = torch.ones(4, 8).bool()
    mask[:, :2] = False
    pairs = pl.PatchPairs(long, padded, None, "last", torch.tensor([[3, 5]] * 4), corrupted_mask=mask)
    found = pl.patch(model, pairs, "resid_post", pos="last")
    for tokens_of, values in ((long, found.clean), (short, found.corrupted)):
        with torch.no_grad():
            logits = gpt2(tokens_of).logits[:, -1]
        assert torch.allclose(values, logits[:, 3] - logits[:, 5], atol=1e-4)
    assert torch.allclose(found.values[-1, 0], found.clean, atol=1e-4), "the last residual of the last position is all"
    right = torch.cat([short, torch.zeros(4, 2).long()], 1)
    both = pl.PatchPairs(long, right, None, "last", torch.tensor([[3, 5]] * 4), corrupted_mask=mask.flip(1))
    assert both.read_pos.tolist() == [[7, 5]] * 4
    again = pl.patch(model, both, "resid_post", pos="last")
    assert torch.allclose(again.corrupted, found.corrupted, atol=1e-4)
    assert torch.allclose(again.values[-1, 0], found.clean, atol=1e-4), "from position 7 to position 5"


def test_answers_of_several_tokens_are_scored_by_their_summed_log_probability(gpt2: Any) -> None:
    model, x = pl.wrap(gpt2), tokens(5, 6)
    y = x.clone()
    y[:, 2] = x[:, 2] % 59 + 1
    answers = [([3, 4], [5]), ([6], [7, 8, 9]), ([1, 2], [2, 1]), ([9], [8]), ([4, 4, 4], [4, 4])]
    pairs = pl.PatchPairs(x, y, 2, "last", answers)

    def right(prompt: Tensor, answer: list[int], put: Tensor | None = None) -> float:
        given = torch.tensor([*prompt.tolist(), *answer])[None]

        def hook(m: Any, args: Any, out: Any) -> Any:
            value = (out[0] if isinstance(out, tuple) else out).clone()
            value[:, 2] = put
            return (value, *out[1:]) if isinstance(out, tuple) else value

        handle = gpt2.transformer.h[0].register_forward_hook(hook) if put is not None else None
        with torch.no_grad():
            logs = gpt2(given).logits[0].log_softmax(-1)
        if handle is not None:
            handle.remove()
        return sum(logs[len(prompt) - 1 + i, token].item() for i, token in enumerate(answer))

    found = pl.patch(model, pairs, SITE, pos=2, batch_size=3)
    chances = pl.patch(model, pairs, SITE, pos=2, metric="prob_diff")
    _, cache = model.run_with_cache(x, SITE)
    for i, (a, b) in enumerate(answers):
        put = cache[SITE][i, 2]
        for run, values in ((x, found.clean), (y, found.corrupted)):
            assert values[i].item() == pytest.approx(right(run[i], a) - right(run[i], b), abs=1e-3)
        assert found.values[0, 0, i].item() == pytest.approx(right(y[i], a, put) - right(y[i], b, put), abs=1e-3)
        likely = torch.tensor([right(x[i], a), right(x[i], b)]).exp()
        assert chances.clean[i].item() == pytest.approx((likely[0] - likely[1]).item(), abs=1e-5)
    with pytest.raises(pl.InputError, match="must be the last real one"):
        pl.patch(model, pl.PatchPairs(x, y, 2, 3, answers), SITE)


def test_sets_of_answers_count_together(gpt2: Any) -> None:
    model, x = pl.wrap(gpt2), tokens(4, 6)
    y = x.flip(0)
    pairs = pl.PatchPairs(x, y, None, -1, [({3, 4}, {5}), ({6}, {7, 8, 9}), ({1, 2}, {3}), ({9}, {8})])
    with torch.no_grad():
        logits = gpt2(x).logits[:, -1]
    want = torch.stack([row[sorted(a)].logsumexp(0) - row[sorted(b)].logsumexp(0) for row, (a, b) in zip(logits, [
        ({3, 4}, {5}), ({6}, {7, 8, 9}), ({1, 2}, {3}), ({9}, {8}),
    ])])  # fmt: skip
    assert torch.allclose(pl.patch(model, pairs, SITE, pos=0).clean, want, atol=1e-4)
    assert pairs[1:3].any_of


def test_heads_are_patched_one_at_a_time(gpt2: Any) -> None:
    model, x = pl.wrap(gpt2), tokens(4, 6)
    y = x.clone()
    y[:, 2] = x[:, 2] % 59 + 1
    pairs = pl.PatchPairs(x, y, 2, -1, torch.tensor([[3, 5]] * 4))
    found = pl.patch(model, pairs, "blocks.1.attn.hook_z", pos=5, heads="each")
    assert found.heads == [0, 1, 2, 3]
    assert found.to_dataframe(correct_only=False)["head"].tolist() == [0, 1, 2, 3]
    width, seen = 8, []
    projection = gpt2.transformer.h[1].attn.c_proj
    handle = projection.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    with torch.no_grad():
        gpt2(x)
    handle.remove()

    def put(m: Any, args: Any) -> Any:
        z = args[0].clone()
        z[:, 5, 2 * width : 3 * width] = seen[0][:, 5, 2 * width : 3 * width]
        return (z,)

    handle = projection.register_forward_pre_hook(put)
    with torch.no_grad():
        logits = gpt2(y).logits[:, -1]
    handle.remove()
    assert torch.allclose(found.values[2, 0], logits[:, 3] - logits[:, 5], atol=1e-4)
    some = pl.patch(model, pairs, "blocks.1.attn.hook_z", pos=5, heads=[-1, 0])
    assert torch.equal(some.values, found.values[[3, 0]])
    with pytest.raises(pl.InputError, match="has no heads"):
        pl.patch(model, pairs, "resid_post", heads=0)


def test_noise_on_the_embedding_is_in_place_in_every_corrupted_run(gpt2: Any) -> None:
    model, x = pl.wrap(gpt2), tokens(4, 8)
    pairs = pl.PatchPairs.from_noise(model, x, torch.tensor([1, 2, 3, 1]), -1, torch.tensor([[3, 5]] * 4), seed=1)
    where = pairs.noise.abs().sum(-1) > 0
    assert where.long().argmax(1).tolist() == [1, 2, 3, 1]
    spread = gpt2.transformer.wte(x).std()
    assert pairs.noise[where].std().item() == pytest.approx(3 * spread.item(), rel=0.15)

    def noisy(put: Tensor | None = None) -> Tensor:
        handles = [gpt2.transformer.wte.register_forward_hook(lambda m, a, out: out + pairs.noise)]
        if put is not None:
            handles.append(
                gpt2.transformer.h[0].register_forward_hook(
                    lambda m, a, out: put if isinstance(out, Tensor) else (put, *out[1:])
                )
            )
        with torch.no_grad():
            logits = gpt2(x).logits[:, -1]
        for handle in handles:
            handle.remove()
        return logits[:, 3] - logits[:, 5]

    _, cache = model.run_with_cache(x, SITE)
    found = pl.patch(model, pairs, [SITE, "blocks.0.attn.hook_z"], None, batch_size=3)
    assert torch.allclose(found.corrupted, noisy(), atol=1e-4)
    assert torch.allclose(found.values[0, 0], noisy(cache[SITE]), atol=1e-4)
    assert torch.allclose(found.values[0, 0], found.clean, atol=1e-4)
    assert (found.clean - found.corrupted).abs().max() > 0.02
    back = pl.patch(model, pairs, SITE, None, mode="noise")
    assert torch.allclose(back.values[0, 0], found.corrupted, atol=1e-4)
    each = pl.attribute(model, pairs, SITE, "each")
    assert torch.allclose(each.corrupted, found.corrupted, atol=1e-4)


def test_a_metric_takes_references_of_its_own(gpt2: Any) -> None:
    model, x = pl.wrap(gpt2), tokens(5, 6)
    pairs = pl.PatchPairs(x, x.flip(0).roll(1, 1), None, -1, torch.tensor([[3, 5]] * 5))
    with torch.no_grad():
        clean = gpt2(x).logits[:, -1]
    metric = pl.metrics.with_references(
        lambda logits, answers, reference: pl.metrics.kl(logits, reference), reference=clean
    )
    own, built = (pl.patch(model, pairs, SITE, [0, 5], metric=m, batch_size=2) for m in (metric, "kl"))
    assert torch.allclose(own.values, built.values, atol=1e-5)
    assert own.clean.abs().max() < 1e-5 < own.corrupted.min()


@pytest.mark.parametrize(
    ("name", "changes", "metric", "text"),
    [
        (
            "classifier",
            {"read_pos": 5, "answers": torch.tensor([[0, 1]] * 7)},
            "logit_diff",
            "answers once for each example",
        ),
        ("classifier", {}, "logit_diff", "compares two answers"),
        ("classifier", {}, "value", "needs one number"),
        ("series", {"answers": torch.tensor([[0, 1]] * 7)}, "logit_diff", "gives one number. Give metric='value'"),
        ("series", {}, "mse", "right values"),
        (
            "embeddings",
            {"answers": torch.tensor([[0, 1]] * 7), "read_pos": None},
            "logit_diff",
            "answers at each position",
        ),
    ],
)
def test_what_has_no_meaning_is_refused_with_its_reason(
    name: str, changes: dict[str, Any], metric: Any, text: str
) -> None:
    case = anything.case(name)
    made = pairs_of(case)
    given = {"read_pos": made.read_pos, "answers": made.answers, **changes}
    pairs = pl.PatchPairs(made.clean, made.corrupted, None, given["read_pos"], given["answers"])
    with pytest.raises(pl.InputError, match=text):
        pl.patch(case.model, pairs, case.site, metric=metric)


def test_the_recovery_of_values_counts_each_pair_in_the_direction_of_its_own_gap() -> None:
    """Gaps of both signs would cancel in a ratio of means: here they do, and a patch that restores half gives one half."""
    clean, corrupted = torch.tensor([3.0, -1.0, 2.0, 0.0]), torch.tensor([1.0, 1.0, 0.0, 2.0])
    half = (clean + corrupted) / 2
    found = pl.PatchResult(
        half[None, None], clean, corrupted, torch.ones(4, dtype=torch.bool), ["s"], [0], ["0"], metric="value"
    )
    assert found.recovery().item() == pytest.approx(0.5)
    assert [end.item() for end in found.interval()] == pytest.approx([0.5, 0.5])
    mixed = dataclasses.replace(found, values=torch.stack([clean[:2], corrupted[2:]]).reshape(1, 1, 4))
    assert mixed.recovery().item() == pytest.approx(0.5)
    assert mixed.interval()[0].item() < 0.5 < mixed.interval()[1].item()
    with pytest.raises(pl.MetricError, match="no gap to restore"):
        dataclasses.replace(found, metric="logit_diff").recovery()


@pytest.mark.parametrize(
    ("pos", "said"), [("last", "the last position of each"), ("differing", "the span 'differing'")]
)
def test_positions_with_a_name_are_said_by_it(pos: Any, said: str) -> None:
    """What a result says must not fail where a position is no number: its repr then falls back to a list of fields."""
    model = anything.case("embeddings").model
    tokens = torch.randint(20, (12, 6), generator=torch.Generator().manual_seed(0))
    other = (tokens + 1) % 20
    with torch.no_grad():
        answers = torch.stack([model(x)[:, -1].argmax(-1) for x in (tokens, other)], 1)
    keep = answers[:, 0] != answers[:, 1]
    spans = {"differing": torch.ones_like(tokens[keep], dtype=torch.bool)}
    pairs = pl.PatchPairs(tokens[keep], other[keep], None, -1, answers[keep], spans=spans)
    site = "blocks.1.hook_resid_post"
    space = pl.subspaces.random(2, 16)
    found = [
        pl.patch(model, pairs, site, pos), pl.attribute(model, pairs, site, pos),
        pl.interchange(model, pairs, {site: space}, pos=pos, controls=1),
    ]  # fmt: skip
    assert all(said in " ".join(result.findings()) for result in found)
