"""Interchange and alignment search on any input and output: equal to hooks on the user's module, or refused with the reason."""

from __future__ import annotations

import dataclasses
from typing import Any

import anything
import pytest
import torch
import transformers as tf
import zoo
from anything import Case
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

import probelens as pl
from probelens.patching.das_training import Lesson, Swaps
from probelens.patching.pairs import chosen_sides
from probelens.tasks.examples import Examples

FAST: dict[str, Any] = {"controls": 1, "kinds": ("random",)}
SITE = "blocks.0.hook_resid_post"


def ask(case: Case, inputs: Any, read: int | None) -> Tensor:
    out = case.read(case.module(**inputs) if isinstance(inputs, dict) else case.module(inputs))
    return out if read is None else out[:, read]


def own_pairs(name: str) -> tuple[Case, pl.PatchPairs]:
    """Pairs of examples that the model answers differently, with its own answers."""
    case = anything.case(name)
    whole = case.batch.examples
    if name == "classifier":  # one class is rare
        whole = Examples(torch.randint(20, (400, 6), generator=torch.Generator().manual_seed(0)))
    lengths = whole.batched.get("lengths")
    at = [None if lengths is None else int(lengths[i]) - 1 for i in range(len(whole))]
    with torch.no_grad():
        said = [int(ask(case, whole.rows([i]), at[i]).argmax(-1)) for i in range(len(whole))]
    left, pairs = list(range(len(whole))), []
    while left:
        i = left.pop(0)
        other = next((j for j in left if at[i] == at[j] and said[i] != said[j]), None)
        if other is not None:
            left.remove(other)
            pairs.append((i, other))
    first, second = ([pair[side] for pair in pairs] for side in (0, 1))
    read = None if lengths is None else torch.tensor([at[i] for i in first])
    answers = torch.tensor([[said[i], said[j]] for i, j in pairs])
    return case, pl.PatchPairs(whole.part(first).inputs, whole.part(second).inputs, None, read, answers)


def put(out: Any, value: Tensor) -> Any:
    """An output of a module with another value in it."""
    if isinstance(out, tuple) and isinstance(out[0], PackedSequence):
        return (PackedSequence(value, *out[0][1:]), *out[1:])
    return (value, *out[1:]) if isinstance(out, tuple) else value


def taken(out: Any) -> Tensor:
    """The tensor of an output; one packed sequence has its positions as rows."""
    first = out[0] if isinstance(out, tuple) else out
    return first.data if isinstance(first, PackedSequence) else first


def by_hand(case: Case, pairs: pl.PatchPairs, matrix: Tensor, pos: int | None) -> tuple[Tensor, Tensor]:
    """Logits (pair, class) after h + (s - h) M, one pair at a time, and those of the corrupted run."""
    found, module = [], case.module.get_submodule(case.last)
    for i in range(len(pairs)):
        clean, corrupted = (side.rows([i]) for side in pairs.sides)
        read = None if pairs.read_pos is None else int(pairs.read_pos[i])
        kept: list[Any] = []
        handle = module.register_forward_hook(lambda m, a, out, kept=kept: kept.append(taken(out)))
        ask(case, clean, read)
        handle.remove()

        def swap(m: Any, args: Any, out: Any, kept: list[Any] = kept) -> Any:
            mine, new = taken(out), taken(out).clone()
            where: Any = slice(None) if pos is None else pos
            where = (slice(None), where) if mine.ndim == 3 else where
            new[where] = mine[where] + (kept[0][where] - mine[where]) @ matrix
            return put(out, new)

        base = ask(case, corrupted, read)
        handle = module.register_forward_hook(swap)
        found.append((ask(case, corrupted, read)[0], base[0]))
        handle.remove()
    swapped, unedited = zip(*found, strict=True)
    return torch.stack(swapped), torch.stack(unedited)


def space_of(case: Case, pairs: pl.PatchPairs) -> pl.Subspace:
    width = pl.collect(case.model, pairs.clean, case.site)[case.site].shape[-1]
    return pl.subspaces.random(width // 2, width, seed=1)


@pytest.mark.parametrize("name", ["classifier", "pictures", "packed"])
@pytest.mark.parametrize("pos", [None, 1])
def test_an_interchange_is_what_hooks_on_the_module_do(name: str, pos: int | None) -> None:
    case, pairs = own_pairs(name)
    space = space_of(case, pairs)
    found = pl.interchange(case.model, pairs, {case.site: space}, pos=pos, batch_size=4, **FAST)
    assert bool(found.correct.all())
    by_condition = {row["condition"]: (row, found.followed[i]) for i, row in enumerate(found.rows)}
    q = space.basis.float()
    eye = torch.eye(space.d)
    seen = []
    for condition, matrix in (("target", q.mT @ q), ("complement", eye - q.mT @ q), ("full", eye)):
        with torch.no_grad():
            logits, base = by_hand(case, pairs, matrix, pos)
        row, followed = by_condition[condition]
        hits = logits.argmax(-1) == pairs.answers[:, 0]
        seen.append(hits)
        assert torch.equal(followed, hits)
        assert row["iia"] == pytest.approx(hits.float().mean().item())
        rows = torch.arange(len(pairs))
        gap = [x[rows, pairs.answers[:, 0]] - x[rows, pairs.answers[:, 1]] for x in (logits, base)]
        with torch.no_grad():
            source = by_hand(
                case, dataclasses.replace(pairs, clean=pairs.corrupted, corrupted=pairs.clean), 0 * eye, pos
            )[0]
        clean = source[rows, pairs.answers[:, 0]] - source[rows, pairs.answers[:, 1]]
        want = (gap[0] - gap[1]).sum() / (clean - gap[1]).sum()
        assert row["recovery"] == pytest.approx(want.item(), abs=1e-3)
    if pos is None:
        assert bool(seen[2].all())
        assert not torch.equal(seen[0], seen[2]), "control: the subspace is not everything"
    assert by_condition["noise"][0]["changed"]


@pytest.mark.parametrize("name", ["classifier", "pictures", "packed"])
def test_a_learning_step_has_the_loss_and_gradient_of_hooks_on_the_module(name: str) -> None:
    case, pairs = own_pairs(name)
    pairs = pairs[:6]
    width = space_of(case, pairs).d
    weight = torch.randn(width, 2, generator=torch.Generator().manual_seed(3)).requires_grad_()
    basis = torch.linalg.qr(weight).Q.mT
    logits, _ = by_hand(case, pairs, basis.mT @ basis, None)
    want = torch.nn.functional.cross_entropy(logits, pairs.answers[:, 0])
    (want_grad,) = torch.autograd.grad(want, weight)
    sides = chosen_sides(case.model, pairs, "das()")
    lesson = Lesson(Swaps(case.model, sides, case.site, None), torch.arange(6), pairs.answers[:, 0])
    got = lesson.loss(torch.linalg.qr(weight).Q.mT, lesson.rows)
    (grad,) = torch.autograd.grad(got, weight)
    assert want_grad.norm() > 1e-3
    assert got.item() == pytest.approx(want.item(), abs=1e-5)
    assert (grad - want_grad).abs().max() < 1e-4 * want_grad.abs().max()


@pytest.mark.parametrize("name", ["classifier", "pictures", "packed"])
def test_a_subspace_is_learned(name: str) -> None:
    case, pairs = own_pairs(name)
    found = pl.das(case.model, pairs, case.site, None, 2, steps=15, lr=0.1, untrained=False, **FAST)
    assert float(found.loss[-3:].mean()) < float(found.loss[0])
    assert {"target", "full", "complement", "train", "shuffled"} <= {row["condition"] for row in found.rows}
    (full,) = (row for row in found.rows if row["condition"] == "full")
    assert full["iia"] == 1


# -- positions, masks and sets -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def gpt2() -> tuple[Any, pl.HookedModel]:
    module = zoo.build("gpt2")
    return module, pl.wrap(module)


def test_each_side_has_its_padding_and_its_positions(gpt2: Any) -> None:
    module, model = gpt2
    long, short = zoo.tokens(8, 7, seed=1), zoo.tokens(8, 5, seed=2)
    with torch.no_grad():
        answers = torch.stack([module(x).logits[:, -1].argmax(-1) for x in (long, short)], 1)
    keep = (answers[:, 0] != answers[:, 1]).nonzero().flatten()
    long, short, answers = long[keep], short[keep], answers[keep]
    padded = torch.cat([short, short.new_zeros(len(short), 2)], 1)
    mask = torch.arange(7).expand(len(short), 7) < 5
    pairs = pl.PatchPairs(long, padded, None, "last", answers, corrupted_mask=mask)
    assert pairs.read_pos.tolist() == [[6, 4]] * len(pairs)
    width = model.cfg.d_model
    space = pl.subspaces.random(width // 2, width, seed=1)
    _, cache = model.run_with_cache(long, SITE)
    _, own = model.run_with_cache(short, SITE)
    q = space.basis.float()
    change = (cache[SITE][:, 6] - own[SITE][:, 4]) @ q.mT @ q

    def hook(m: Any, args: Any, out: Any) -> Any:
        new = (out[0] if isinstance(out, tuple) else out).clone()
        new[:, 4] += change
        return (new, *out[1:]) if isinstance(out, tuple) else new

    handle = module.transformer.h[0].register_forward_hook(hook)
    with torch.no_grad():
        logits = module(short).logits[:, -1]
    handle.remove()
    for pos in ("last", torch.tensor([[6, 4]] * len(pairs))):
        found = pl.interchange(model, pairs, {SITE: space}, pos=pos, **FAST)
        i = [row["condition"] for row in found.rows].index("target")
        assert bool(found.correct.all())
        assert torch.equal(found.followed[i], logits.argmax(-1) == answers[:, 0])
        difference = cache[SITE][:, 6] - own[SITE][:, 4]
        assert found.rows[i]["variance"] == pytest.approx(
            (change.square().sum() / difference.square().sum()).item(), 1e-4
        )


def test_any_answer_of_a_set_counts(gpt2: Any) -> None:
    module, model = gpt2
    x = zoo.tokens(30, 6, seed=4)
    y = x.roll(1, 0)
    with torch.no_grad():
        best = [module(z).logits[:, -1].argsort(-1, descending=True)[:, :2] for z in (x, y)]
    keep = [i for i in range(30) if len({*best[0][i].tolist(), *best[1][i].tolist()}) == 4]
    rows = [(set(best[0][i].tolist()), set(best[1][i].tolist())) for i in keep]
    sets = pl.PatchPairs(x[keep], y[keep], None, -1, rows)
    found = pl.interchange(model, sets, {SITE: pl.subspaces.random(4, model.cfg.d_model, seed=0)}, pos=None, **FAST)
    assert bool(found.correct.all())
    single = dataclasses.replace(sets, answers=torch.stack([best[0][keep][:, 0], best[1][keep][:, 0]], 1), any_of=False)
    alone = pl.interchange(model, single, {SITE: pl.subspaces.random(4, model.cfg.d_model, seed=0)}, pos=None, **FAST)
    assert len(keep) > 5
    assert all(a["iia"] >= b["iia"] for a, b in zip(found.rows, alone.rows, strict=True))
    second = dataclasses.replace(sets, answers=torch.stack([best[0][keep][:, 1], best[1][keep][:, 1]], 1), any_of=False)
    assert not bool(
        pl.interchange(model, second, {SITE: pl.subspaces.random(4, model.cfg.d_model)}, **FAST).correct.any()
    )


def test_the_loss_of_a_set_is_that_of_any_of_it(gpt2: Any) -> None:
    module, model = gpt2
    x = zoo.tokens(4, 6, seed=4)
    pairs = pl.PatchPairs(x, x.roll(1, 0), None, -1, [({1, 2}, {3}), ({4}, {5, 6}), ({7, 8}, {9}), ({1}, {2})])
    sides = chosen_sides(model, pairs, "das()")
    lesson = Lesson(Swaps(model, sides, SITE, None), torch.arange(4), sides.answers[:, 0])
    got = lesson.loss(torch.eye(model.cfg.d_model), lesson.rows)
    with torch.no_grad():
        chances = module(x).logits[:, -1].softmax(-1)
    want = -sum(chances[i, sorted(a)].sum().log() for i, a in enumerate([{1, 2}, {4}, {7, 8}, {1}])) / 4
    assert got.item() == pytest.approx(float(want), abs=1e-4)


def test_an_encoder_that_classifies_sequences() -> None:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 30,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    module = tf.BertForSequenceClassification(tf.BertConfig(**sizes, max_position_embeddings=16, num_labels=3)).eval()
    x = torch.randint(5, 30, (80, 6))
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(4) if p.ndim == 2 else None
        module.classifier.bias.sub_(module(x).logits.mean(0))
        y = module(x).logits.argmax(-1)
    keep = (y != y.roll(1)).nonzero().flatten()
    pairs = pl.PatchPairs(x[keep], x.roll(1, 0)[keep], None, None, torch.stack([y, y.roll(1)], 1)[keep])
    model, space = pl.wrap(module), pl.subspaces.random(8, 16, seed=1)
    found = pl.interchange(model, pairs, {SITE: space}, pos=None, **FAST)
    kept: list[Tensor] = []
    layer, q = module.bert.encoder.layer[0], space.basis.float()
    handle = layer.register_forward_hook(lambda m, a, out: kept.append(out[0] if isinstance(out, tuple) else out))
    with torch.no_grad():
        module(pairs.clean), module(pairs.corrupted)
    handle.remove()
    new = kept[1] + (kept[0] - kept[1]) @ q.mT @ q
    handle = layer.register_forward_hook(lambda m, a, out: (new, *out[1:]) if isinstance(out, tuple) else new)
    with torch.no_grad():
        logits = module(pairs.corrupted).logits
    handle.remove()
    i = [row["condition"] for row in found.rows].index("target")
    assert torch.equal(found.followed[i], logits.argmax(-1) == pairs.answers[:, 0])
    assert found.followed[i].unique().tolist() == [False, True]
    with pytest.raises(pl.InputError, match="no read_pos: the model answers once"):
        pl.patch_sites(model, pairs)


# -- refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["interchange", "das"])
@pytest.mark.parametrize(
    ("name", "changes", "text"),
    [
        ("classifier", {"answers": None}, "the pairs say none"),
        ("classifier", {"answers": torch.rand(7, 2)}, "values have no argmax"),
        ("classifier", {"answers": [([0, 1], [1])] * 7}, "several tokens have no argmax"),
        ("classifier", {"read_pos": 2}, "answers once for each example"),
        ("classifier", {"answers": torch.tensor([[0, 9]] * 7)}, "answer id 9 is outside the 3"),
        ("series", {}, "gives one number, which has no argmax"),
        ("series", {"answers": None}, "gives one number, which has no argmax"),
        ("embeddings", {}, "answers at each position"),
    ],
)
def test_what_has_no_argmax_is_refused_with_its_reason(
    what: str, name: str, changes: dict[str, Any], text: str
) -> None:
    case = anything.case(name)
    whole = Examples.of(case.batch)
    given = {"answers": torch.tensor([[0, 1]] * 7), "read_pos": None, **changes}
    pairs = pl.PatchPairs(
        whole.part(range(7)).inputs, whole.part(range(7, 14)).inputs, None, given["read_pos"], given["answers"]
    )
    calls = {
        "das": lambda: pl.das(case.model, pairs, case.site, None, 2, untrained=False),
        "interchange": lambda: pl.interchange(case.model, pairs, {case.site: pl.subspaces.random(2, 12)}, pos=None),
    }
    with pytest.raises(pl.InputError, match=text):
        calls[what]()
