"""Every formal task: labels against slow oracles written here, pairs, splits, streams, seeds, bad input."""

from __future__ import annotations

import itertools
import random
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

import probelens as pl
from probelens.errors import InputError, ShapeError
from probelens.tasks import Batch, Counter, Dyck, FlipFlop, GroupWords, Parity, Task, make

# Oracles: one string of symbols in, the class *names* at each position out; ValueError for an illegal string.

Rows = list[dict[str, str | None]]


def parity_oracle(task: Any, word: Sequence[str]) -> Rows:
    return [{"state": "odd" if word[: t + 1].count("1") % 2 else "even"} for t in range(len(word))]


def group_oracle(task: Any, word: Sequence[str]) -> Rows:
    rows: Rows = []
    if task.group[0] == "Z":
        total = 0
        for g in word:
            total += int(g)
            rows.append({"state": str(total % int(task.group[1:]))})
        return rows
    n = int(task.group[1:])
    images = list(range(n))  # where each point is now
    for g in word:
        images = [int(g[image]) for image in images]
        row: dict[str, str | None] = {"state": "".join(map(str, images))}
        if task.group[0] == "S":
            odd = (n - cycles(images)) % 2 == 1
            swap = {0: 1, 1: 0}
            row["sign"] = "odd" if odd else "even"
            if n >= 3:
                even_part = [swap.get(image, image) for image in images] if odd else images
                row["mod_sign"] = "".join(map(str, even_part))
        rows.append(row)
    return rows


def cycles(images: list[int]) -> int:
    seen: set[int] = set()
    count = 0
    for start in range(len(images)):
        count += start not in seen
        while start not in seen:
            seen.add(start)
            start = images[start]
    return count


def dyck_oracle(task: Any, word: Sequence[str]) -> Rows:
    openers, closers = task.vocab[: task.k], task.vocab[task.k : 2 * task.k]
    stack: list[str] = []
    rows: Rows = []
    for symbol in word:
        if symbol in openers:
            stack.append(symbol)
        elif symbol in closers:
            if not stack or openers.index(stack.pop()) != closers.index(symbol):
                raise ValueError("closer without its opener")
        elif not (task.noop and symbol == "."):
            raise ValueError(symbol)
        if len(stack) > task.max_depth:
            raise ValueError("too deep")
        top = stack[-1] if stack else None
        rows.append(
            {
                "depth": str(len(stack)),
                "top": top or "empty",
                "closer": closers[openers.index(top)] if top else "none",
                "state": f"{len(stack)} {top}" if top else "empty",
            }
        )
    return rows


def counter_oracle(task: Any, word: Sequence[str]) -> Rows:
    count, rows = 0, []
    for symbol in word:
        if symbol == "+" and count < task.max_depth:
            count += 1
        if symbol == "-" and count > 0:
            count -= 1
        rows.append({"depth": str(count)})
    return rows


def flip_flop_oracle(task: Any, word: Sequence[str]) -> Rows:
    text = "".join(word)
    if not re.fullmatch(r"w(?:[01](?:[wri][01])*[wri]?)?", text):
        raise ValueError(text)
    memory: str | None = None
    rows: Rows = []
    for t, symbol in enumerate(text):
        if t and text[t - 1] == "w":
            memory = symbol
        if t and text[t - 1] == "r" and symbol != memory:
            raise ValueError("a read that lies")
        recall = memory if symbol == "r" else "none"
        rows.append({"state": memory, "recall": recall if memory else None})
    return rows


Oracle = Callable[[Any, Sequence[str]], Rows]
TASKS: list[tuple[Task, Oracle]] = [
    (Parity(), parity_oracle),
    (Parity(bos=True), parity_oracle),
    (GroupWords("Z5"), group_oracle),
    (GroupWords("Z7", generators="step"), group_oracle),
    (GroupWords("S2"), group_oracle),
    (GroupWords("S3"), group_oracle),
    (GroupWords("S3", generators=["120", "021"], target="mod_sign", bos=True), group_oracle),
    (GroupWords("S4", generators="adjacent"), group_oracle),
    (GroupWords("A4", generators="cycles"), group_oracle),
    (GroupWords("A5", generators="nontrivial"), group_oracle),
    (Dyck(), dyck_oracle),
    (Dyck(k=1, max_depth=3, bos=True), dyck_oracle),
    (Dyck(k=3, max_depth=4, noop=0.2, target="state"), dyck_oracle),
    (Dyck(k=6, max_depth=2, noop=0.1, target="top"), dyck_oracle),
    (Counter(), counter_oracle),
    (Counter(max_depth=3, noop=0.3, bos=True), counter_oracle),
    (FlipFlop(), flip_flop_oracle),
    (FlipFlop(ignore=0.1, target="recall", bos=True), flip_flop_oracle),
]
# A task of the library counts its strings; any other may answer None.
COUNTED = (Parity, GroupWords, Dyck, Counter, FlipFlop)
EACH = pytest.mark.parametrize(("task", "oracle"), TASKS, ids=[repr(task) for task, _ in TASKS])


def words(task: Task, tokens: torch.Tensor) -> list[list[str]]:
    """Token strings without BOS."""
    rows = tokens.tolist()
    if task.bos:
        assert all(row[0] == task.d_vocab - 1 for row in rows)
        rows = [row[1:] for row in rows]
    return [[task.vocab[i] for i in row] for row in rows]


def check_labels(task: Task, oracle: Oracle, batch: Batch) -> None:
    for row, word in enumerate(words(task, batch.tokens)):
        truth = oracle(task, word)
        for t, names in enumerate(truth, start=task.bos):
            assert set(names) == set(task.label_names)
            assert batch.mask[row, t] == all(name is not None for name in names.values())
            for label, name in names.items():
                if batch.mask[row, t]:
                    assert task.class_names(label)[batch.labels[label][row, t]] == name
        if task.bos:
            assert not batch.mask[row, 0]
    for values in batch.labels.values():
        assert (values[~batch.mask] == -100).all()


@EACH
def test_every_label_of_every_position_equals_the_slow_oracle(task: Task, oracle: Oracle) -> None:
    for length in (1, 2, 7, 40):
        batch = task.sample(50, length=length, seed=length)
        assert batch.tokens.shape == (50, length + task.bos)
        check_labels(task, oracle, batch)


@EACH
def test_labels_of_given_tokens_equal_those_of_the_sample(task: Task, oracle: Oracle) -> None:
    batch = task.sample(20, length=9, seed=2)
    for label, values in task.labels(batch.tokens).items():
        assert values.equal(batch.labels[label])


@EACH
def test_all_strings_the_oracle_allows_are_counted_and_no_other(task: Task, oracle: Oracle) -> None:
    length = 3 if task.n_symbols > 8 else 4
    if task.n_symbols**length > 20_000:
        length = 2
    tokens = np.array(list(itertools.product(range(task.n_symbols), repeat=length)))
    allowed = []
    for row in tokens.tolist():
        try:
            oracle(task, [task.vocab[i] for i in row])
            allowed.append(True)
        except ValueError:
            allowed.append(False)
    counted = task.n_strings(length)
    assert counted == sum(allowed) or (counted is None and not isinstance(task, COUNTED))
    assert task.legal(tokens).tolist() == allowed
    if not all(allowed):
        with pytest.raises(InputError):
            task.annotate(tokens)


@EACH
def test_equal_seeds_give_equal_batches_and_others_do_not(task: Task, oracle: Oracle) -> None:
    assert task.sample(30, seed=5).tokens.equal(task.sample(30, seed=5).tokens)
    assert not task.sample(30, seed=5).tokens.equal(task.sample(30, seed=6).tokens)
    assert task.pairs(9, seed=5).clean.equal(task.pairs(9, seed=5).clean)
    assert not task.pairs(9, seed=5).clean.equal(task.pairs(9, seed=6).clean)


@EACH
def test_pairs_differ_in_one_early_token_and_answers_are_the_true_labels(task: Task, oracle: Oracle) -> None:
    # Dyck tells "depth" from "type" pairs by the label, so its labels cover both kinds.
    labels = ("depth",) if task.name == "dyck" and task.k == 1 else task.label_names  # type: ignore[attr-defined]
    for label, length in itertools.product(labels, (3, 10, 41)):
        if label == "depth" and task.name == "dyck" and task.max_depth < 3:  # type: ignore[attr-defined]
            continue
        if label == "sign" and task.config["generators"] == "adjacent":  # all odd: no change of token changes it
            continue
        pairs = task.pairs(40, length=length, seed=1, label=label)
        check_pairs(task, oracle, pairs)
        assert pairs.label == label
        last = length - 1 + task.bos
        if label == "recall":
            last -= (length - 1) % 2
        assert (pairs.read_pos == last).all()


def check_pairs(task: Task, oracle: Oracle, pairs: pl.PatchPairs) -> None:
    differ = pairs.clean != pairs.corrupted
    assert (differ.sum(1) == 1).all()
    assert differ[torch.arange(len(pairs)), pairs.edit_pos].all()
    assert (pairs.edit_pos < pairs.read_pos).all()
    assert (pairs.edit_pos - int(task.bos) <= (pairs.read_pos - int(task.bos)) // 2).all()
    names = task.class_names(pairs.label)
    for side, tokens in enumerate((pairs.clean, pairs.corrupted)):
        for row, word in enumerate(words(task, tokens)):
            # Only a recall string may go on, after the read, as the other one would.
            word = word[: int(pairs.read_pos[row]) + 1 - task.bos] if pairs.label == "recall" else word
            truth = oracle(task, word)[int(pairs.read_pos[row]) - task.bos][pairs.label]
            assert names[pairs.answers[row, side]] == truth
    assert (pairs.answers[:, 0] != pairs.answers[:, 1]).all()


@pytest.mark.parametrize("read_pos", [3, 4, 20, 39])
def test_pairs_can_be_read_at_any_position(read_pos: int) -> None:
    for task, oracle in TASKS:
        pos = read_pos + task.bos
        if task.name == "flip_flop" and task.target == "recall" and read_pos % 2:
            continue
        if isinstance(task, Dyck) and task.max_depth < 3 and task.target == "depth":
            continue
        pairs = task.pairs(20, length=40, read_pos=pos)
        assert (pairs.read_pos == pos).all()
        check_pairs(task, oracle, pairs)


@EACH
def test_splits_share_no_string_and_number_their_groups_through(task: Task, oracle: Oracle) -> None:
    parts = task.splits({"train": 60, "validation": 20, "test": 20}, length=20, seed=3)
    tokens = torch.cat([part.tokens for part in parts.values()])
    assert [len(part) for part in parts.values()] == [60, 20, 20]
    assert len(torch.unique(tokens, dim=0)) == 100
    assert torch.cat([part.groups for part in parts.values()]).tolist() == list(range(100))
    check_labels(task, oracle, parts["test"])


def test_splits_can_use_up_every_string_and_ask_for_no_more() -> None:
    parts = Parity().splits({"train": 10, "test": 6}, length=4)
    assert len({tuple(row) for part in parts.values() for row in part.tokens.tolist()}) == 16
    with pytest.raises(InputError, match="asked for 17 different strings, but parity has only 16 of length 4"):
        Parity().splits({"train": 10, "test": 7}, length=4)


def test_splits_do_not_put_the_rare_strings_last() -> None:
    # Of the 107 strings of Dyck-(2, 3) of length 5 the frequent ones are found first.
    task = Dyck(max_depth=3)
    total = task.n_strings(5)
    means = []
    for seed in range(30):
        parts = task.splits({"first": total // 2, "second": total - total // 2}, length=5, seed=seed)
        means.append([part.labels["depth"].double().mean().item() for part in parts.values()])
    first, second = np.array(means).T
    assert abs((first - second).mean()) < 4 * (first - second).std() / np.sqrt(30)


def test_a_search_without_end_is_given_up() -> None:
    class Constant(Task):
        def __init__(self) -> None:
            super().__init__("constant", ("a", "b"), {"y": ("a", "b")}, target="y")

        def draw(self, n: int, length: int, rng: np.random.Generator) -> np.ndarray:
            return np.zeros((n, length), dtype=np.int64)

        def annotate(self, symbols: np.ndarray) -> dict[str, np.ndarray]:
            return {"y": symbols * 0}

    task = Constant()
    with pytest.raises(InputError, match="only 1 of 2 different strings"):
        task.splits({"train": 2}, length=3)
    with pytest.raises(InputError, match="found 0 of 2 pairs"):
        task.pairs(2, length=3)
    with pytest.raises(InputError, match="no string of constant of length 3 is left"):
        task.sample(1, length=3, exclude=task.sample(1, length=3))


@EACH
def test_a_stream_never_yields_a_held_out_string_and_resumes_at_any_step(task: Task, oracle: Oracle) -> None:
    held_out = task.splits({"validation": 3, "test": 3}, length=6, seed=1)
    forbidden = {tuple(row) for part in held_out.values() for row in part.tokens.tolist()}

    def strings(stream: Any, steps: int) -> list[list[tuple[int, ...]]]:
        return [[tuple(row) for row in next(stream).tokens.tolist()] for _ in range(steps)]

    free = strings(task.stream(300, length=6, seed=1), 8)
    if (counted := task.n_strings(6)) is not None and counted < 2000:
        assert forbidden.intersection(*[set().union(*free)]), "control: they do come up when nothing is excluded"
    clean = strings(task.stream(300, length=6, seed=1, exclude=held_out), 8)
    assert not forbidden & set().union(*clean)
    assert strings(task.stream(300, length=6, seed=1, exclude=held_out, start=5), 3) == clean[5:]


@pytest.mark.parametrize("form", ["batch", "tokens", "list", "dict"])
def test_exclude_takes_batches_tokens_lists_and_dicts(form: str) -> None:
    task = Parity(bos=True)
    held_out = task.splits({"a": 8, "b": 8}, length=5)
    exclude: Any = {
        "batch": held_out["a"],
        "tokens": held_out["a"].tokens,
        "list": [held_out["a"], held_out["b"].tokens],
        "dict": held_out,
    }[form]
    forbidden = held_out["a"].tokens.tolist()
    assert not any(row in forbidden for row in task.sample(200, length=5, exclude=exclude).tokens.tolist())
    # Other lengths are other strings.
    assert len(task.sample(5, length=6, exclude=exclude)) == 5


def test_streams_samples_splits_and_pairs_of_one_seed_are_independent() -> None:
    task = Parity()
    drawn = [
        task.sample(16, length=30, seed=0).tokens,
        next(task.stream(16, length=30, seed=0)).tokens,
        task.splits({"a": 16}, length=30, seed=0)["a"].tokens,
        task.pairs(16, length=30, seed=0).clean,
    ]
    for first, second in itertools.combinations(drawn, 2):
        assert not (first[:, None] == second[None]).all(2).any()


def test_no_global_random_state_is_read_or_changed() -> None:
    def state() -> tuple[Any, ...]:
        return random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().tolist()  # noqa: NPY002

    before = state()
    drawn = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        random.seed(seed)
        before = state()
        drawn.append([])
        for task, _ in TASKS:
            batch, parts = task.sample(5), task.splits({"a": 5})
            drawn[-1] += [batch.tokens, parts["a"].tokens, next(task.stream(5)).tokens]
            task.baselines(batch)
        assert state() == before
    assert all(a.equal(b) for a, b in zip(*drawn, strict=True))


def test_parity_is_the_word_problem_of_z2() -> None:
    tokens = Parity().sample(50).tokens
    assert Parity().labels(tokens)["state"].equal(GroupWords("Z2").labels(tokens)["state"])


@pytest.mark.parametrize("group", ["Z6", "S3", "S4", "S5", "A4", "A5", "A6"])
def test_group_tables_obey_the_group_axioms(group: str) -> None:
    task = GroupWords(group)
    n = len(task.elements)
    everyone = np.arange(n)
    assert n == {"Z6": 6, "S3": 6, "S4": 24, "S5": 120, "A4": 12, "A5": 60, "A6": 360}[group]
    assert (task.table[0] == everyone).all()
    assert (task.table[:, 0] == everyone).all()
    assert (np.sort(task.table, axis=0) == everyone[:, None]).all()
    assert (np.sort(task.table, axis=1) == everyone).all()
    a, b, c = np.random.default_rng(0).integers(0, n, (3, 5000))
    assert (task.table[task.table[a, b], c] == task.table[a, task.table[b, c]]).all()


def test_sign_and_class_mod_sign_together_are_the_state() -> None:
    labels = GroupWords("S4").sample(2000).labels
    joint = set(zip(*(labels[k].flatten().tolist() for k in ("state", "sign", "mod_sign")), strict=True))
    assert len(joint) == 24
    assert len({(sign, rest) for _, sign, rest in joint}) == 24


@pytest.mark.parametrize(("generators", "expected"), [("all", 1 / 6), ("transpositions", 1 / 3)])
def test_position_tells_the_state_of_s3_only_by_its_sign(generators: str, expected: float) -> None:
    task = GroupWords("S3", generators=generators)
    parts = task.splits({"train": 4000, "test": 4000}, seed=0)
    scores = task.baselines(parts["train"], parts["test"])
    assert scores["position"]["accuracy"] == pytest.approx(expected, abs=0.01)
    assert scores["majority"]["accuracy"] == pytest.approx(1 / 6, abs=0.01)
    sign = task.baselines(parts["train"], parts["test"], "sign")["position"]["accuracy"]
    assert sign == pytest.approx(1.0 if generators == "transpositions" else 0.5, abs=0.02)


def test_flip_flop_reads_writes_and_ignores_as_often_as_asked() -> None:
    tokens = FlipFlop(ignore=0.6).sample(2000, length=80).tokens[:, 2::2]
    shares = [(tokens == FlipFlop().vocab.index(symbol)).double().mean().item() for symbol in "wri"]
    assert shares == pytest.approx([0.2, 0.2, 0.6], abs=0.01)


@EACH
def test_config_makes_the_same_task_again(task: Task, oracle: Oracle) -> None:
    again = make(task.config)
    assert type(again) is type(task)
    assert repr(again) == repr(task)
    assert again.sample(3).tokens.equal(task.sample(3).tokens)


def test_make_takes_names_in_any_spelling_and_groups() -> None:
    assert repr(make("flip-flop")) == repr(make("FlipFlop")) == repr(FlipFlop())
    assert make("a5").name == "A5"
    with pytest.raises(InputError, match=r"Allowed: 'parity', .*'flip_flop', 'code_depth', 'S3'") as caught:
        make("nosuch")
    assert "groupwords" not in str(caught.value), "a name that fails without more is no advice"
    with pytest.raises(InputError, match="unknown task 'parety'. Nearest: 'parity'"):
        make("parety")
    with pytest.raises(InputError, match="Parity can't be made.*max_depth"):
        make("parity", max_depth=3)


def test_widths_leave_room_for_every_token_and_every_class() -> None:
    assert (Dyck().d_vocab, Dyck(bos=True).d_vocab, Dyck(noop=0.1).d_vocab) == (4, 5, 5)
    assert (Dyck().vocab_size, Dyck(target="state").vocab_size, Dyck(max_depth=1, bos=True).vocab_size) == (11, 21, 5)
    for task, _ in TASKS:
        assert task.sample(100).tokens.max() < task.d_vocab
        assert task.n_classes == {label: len(task.class_names(label)) for label in task.label_names}


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: Parity().sample(0), "n=0 must be a whole number, at least 1"),
        (lambda: Parity().sample(-3), "n=-3"),
        (lambda: Parity().sample(True), "n=True must be a whole number"),
        (lambda: Parity().sample(2.0), "n=2.0 must be a whole number"),
        (lambda: Parity().sample(1, length=-1), "length=-1"),
        (lambda: Parity().sample(1, length=0), "length=0"),
        (lambda: Parity().sample(1, seed=-1), "seed=-1"),
        (lambda: Parity().sample(1, seed=None), "seed=None"),
        (lambda: Parity().stream(0), "batch_size=0"),
        (lambda: Parity().stream(1, start=-1), "start=-1"),
        (lambda: Parity().pairs(1, length=1), "length=1.*at least 2"),
        (lambda: Parity().pairs(1, read_pos=0), "read_pos=0.*from 1 to 39"),
        (lambda: Parity().pairs(1, read_pos=40), "read_pos=40.*from 1 to 39"),
        (lambda: Parity(bos=True).pairs(1, read_pos=1), "read_pos=1.*from 2 to 40"),
        (lambda: Parity().pairs(1, label="stat"), "unknown label of parity 'stat'. Nearest: 'state'"),
        (lambda: Parity(target="depth"), "unknown label for target of parity 'depth'. Allowed: 'state'"),
        (lambda: Parity().class_names("x"), "unknown label"),
        (lambda: Parity().splits({}), "must name the splits"),
        (lambda: Parity().splits({"train": 0}), r"sizes\['train'\]=0"),
        (lambda: Parity().labels(torch.tensor([[0, 2]])), "token id 2 is out of the vocabulary.*0 to 1"),
        (lambda: Parity(bos=True).labels(torch.tensor([[0, 1]])), "start with <bos>, id 2"),
        (lambda: Parity(bos=True).labels(torch.tensor([[2, 2]])), "<bos> in front only"),
        (lambda: Parity().baselines(Batch(torch.zeros(1, 1).long())), "train has no label 'state'"),
        (lambda: GroupWords("D4"), "unknown group 'D4'. Allowed: 'Z2' to 'Z256'"),
        (lambda: GroupWords("S7"), "unknown group 'S7'"),
        (lambda: GroupWords("S1"), "unknown group"),
        (lambda: GroupWords(3), "unknown group 3"),
        (lambda: GroupWords("S3", generators="transposition"), "unknown generators.*Nearest: 'transpositions'"),
        (lambda: GroupWords("Z5", generators="transpositions"), "defined for S_n, not for Z5"),
        (lambda: GroupWords("S3", generators=["120"]), "reach 3 of the 6 elements"),
        (lambda: GroupWords("S3", generators=["130"]), "unknown element of S3 '130'"),
        (lambda: GroupWords("S3", generators=[]), "at least one element"),
        (lambda: GroupWords("S3", generators=["120", "120"]), "each only once"),
        (lambda: GroupWords("A5", target="sign"), "unknown label for target of A5 'sign'"),
        (lambda: GroupWords("S3", generators="transpositions").pairs(1, label="sign"), "found 0 of 1 pairs"),
        (lambda: Dyck(max_depth=0), "max_depth=0"),
        (lambda: Dyck(k=0), "k=0"),
        (lambda: Dyck(noop=1.0), "noop=1.0 must be a number, at least 0 and below 1"),
        (lambda: Dyck(noop=float("nan")), "noop=nan"),
        (lambda: Dyck(noop="some"), "noop='some' must be a number"),
        (lambda: Dyck().pairs(1, kind="typ"), "unknown kind of Dyck pairs 'typ'. Nearest: 'type'"),
        (lambda: Dyck().pairs(1, kind="type", label="depth"), "doesn't change the label 'depth'"),
        (lambda: Dyck().pairs(1, kind="depth", label="top"), "doesn't change the label 'top'"),
        (lambda: Dyck(k=1).pairs(1, kind="type"), "k of at least 2"),
        (lambda: Dyck(max_depth=2).pairs(1, kind="depth"), "max_depth of at least 3"),
        (lambda: Dyck(max_depth=2).pairs(1, kind="type"), "max_depth of at least 3"),
        (lambda: Dyck(max_depth=1, noop=0.2).pairs(1, kind="type"), "max_depth of at least 2"),
        (lambda: Dyck().labels(torch.tensor([[0, 3]])), r"string 0 isn't a prefix.*token 1, after '\( \]'"),
        (lambda: Counter(max_depth=-1), "max_depth=-1"),
        (lambda: Counter(max_depth=2).pairs(1), "max_depth of at least 3"),
        (lambda: FlipFlop(ignore=1.5), "ignore=1.5"),
        (lambda: FlipFlop(ignore=0), "above 0 and below 1"),
        (lambda: FlipFlop().pairs(1, read_pos=1), "there is no bit before position 1"),
        (lambda: FlipFlop().pairs(1, read_pos=3, label="recall"), "Use 2 or 4"),
        (lambda: FlipFlop().labels(torch.tensor([[2, 1, 3, 0]])), "string 0 isn.t a flip-flop string.*token 3"),
    ],
)
def test_bad_input_is_named_with_what_is_allowed(call: Callable[[], object], text: str) -> None:
    with pytest.raises(InputError, match=text):
        call()


def test_a_task_whose_draw_has_the_wrong_shape_is_told_so() -> None:
    class Short(Parity):
        def draw(self, n: int, length: int, rng: np.random.Generator) -> np.ndarray:
            return super().draw(n, length - 1, rng)

    with pytest.raises(ShapeError, match=r"draw of parity gave \(2, 3\); it must give \(2, 4\)"):
        Short().sample(2, length=4)


def test_tasks_load_nothing_but_torch_and_numpy() -> None:
    code = (
        "import sys, probelens.tasks; "
        "heavy = {'pandas', 'sklearn', 'plotly', 'transformers', 'scipy', 'pyarrow'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
