"""CodeDepth: labels against a scanner written here, with bytes and trained tokenizers; corpora; splits."""

from __future__ import annotations

import gzip
import json
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from probelens.errors import InputError
from probelens.tasks import Batch, CodeDepth, make
from probelens.tasks.code.nesting import nesting

STDLIB = Path(sysconfig.get_paths()["stdlib"])


def scan(code: str) -> tuple[list[int], list[int]]:
    """Bracket and indent depth after each character, without ``tokenize``: one pass over the characters."""
    depths, indents = [0], [0]
    depth, blocks, i = 0, [0], 0
    quote = ""
    comment = False
    fresh = True  # at the start of a logical line, in its white space
    while i < len(code):
        char, step = code[i], 1
        if fresh and not quote and not comment and char not in " \t\f\n#":
            width = i - (code.rfind("\n", 0, i) + 1)
            if width > blocks[-1]:
                blocks.append(width)
                indents[-1] = len(blocks) - 1  # counts from the last character of its white space
            while width < blocks[-1]:
                blocks.pop()
            fresh = False
        if comment:
            comment = char != "\n"
        elif quote:
            if char == "\\":
                step = 2
            elif code.startswith(quote, i):
                step, quote = len(quote), ""
        elif char == "#":
            comment = True
        elif char in "'\"":
            quote = char * 3 if code.startswith(char * 3, i) else char
            step = len(quote)
        elif char == "\\":
            step = 2  # an escaped line end goes on with the same logical line
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        if char == "\n" and not quote and depth == 0:
            fresh = True
        depths += [depth] * step
        indents += [len(blocks) - 1] * step
        i += step
    return depths[: len(code) + 1], indents[: len(code) + 1]


SNIPPETS = {
    "nested": "def f(a, b=[1, (2, 3)]):\n    return {a: [b, (a, [b])]}\n",
    "strings": "def f():\n    x = '(' + \"[\" + '''{\n((('''\n    return x + '\\')('  # ((([\n",
    "blocks": "def f(x):\n    if x:\n        for y in x:\n            pass\n  # note\n    \n    return x",
    "continuation": "def f(x):\n    y = x + \\\n  1\n    z = (x +\n1)\n    return z\n",
    "tabs": "def f(x):\n\tif x:\n\t\treturn (x)\n\treturn [\n]\n",
    "accents": "def é(ä):\n    return ('ü', [ä, '日本(', 'x'])\n",
    "decorated": "@wrap(a, [b])\nasync def f(x) -> dict[str, int]:\n    async with g(x):\n        pass\n",
}


@pytest.mark.parametrize("name", SNIPPETS)
def test_nesting_equals_a_scanner_that_knows_no_tokens(name: str) -> None:
    code = SNIPPETS[name]
    found = nesting(code)
    assert found is not None
    assert found[0].tolist() == scan(code)[0]
    assert found[1].tolist() == scan(code)[1]


def test_nesting_of_a_known_line() -> None:
    found = nesting("f(a[0])\n")
    assert found is not None
    assert found[0].tolist() == [0, 0, 1, 1, 2, 2, 1, 0, 0]


def test_brackets_in_f_strings_do_not_count() -> None:
    found = nesting("x = f'{a[0]!r:>{w}} (' + f(1)\n")
    assert found is not None
    assert found[0].tolist() == [0] * 27 + [1, 1, 0, 0]


@pytest.mark.parametrize("code", ["x = )\n", "x = '''never closed\n", "if x:\n        a\n    b\n"])
def test_text_that_tokenize_refuses_has_no_nesting(code: str) -> None:
    assert nesting(code) is None


@pytest.fixture(scope="module")
def email() -> list[tuple[str, str]]:
    """Functions of the standard library's email package, each module a group."""
    task = CodeDepth(corpus=STDLIB / "email")
    names = task.group_names
    return [(names[g], code) for g, code in zip(task._groups, task._corpus.codes, strict=True)]


def trained(kind: str, corpus: list[tuple[str, str]]) -> Any:
    """A small tokenizer of the given kind, trained on the corpus."""
    tokenizers = pytest.importorskip("tokenizers")
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

    special = ["<|endoftext|>", "<unk>"]
    if kind.startswith("byte_bpe"):
        tok = tokenizers.Tokenizer(models.BPE())
        tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tok.decoder = decoders.ByteLevel()
        tok.post_processor = processors.ByteLevel(trim_offsets=kind.endswith("trimmed"))
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=special, initial_alphabet=alphabet)
    elif kind == "metaspace":
        tok = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
        tok.pre_tokenizer = pre_tokenizers.Metaspace()
        tok.decoder = decoders.Metaspace()
        trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=special)
    else:
        tok = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
        tok.normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.Lowercase()])
        tok.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace()])
        trainer = trainers.WordPieceTrainer(vocab_size=900, special_tokens=special)
    tok.train_from_iterator([code for _, code in corpus], trainer)
    return tok


def wrapped(tokenizer: Any) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")


KINDS = ["byte_bpe", "byte_bpe_trimmed", "metaspace", "wordpiece"]


@pytest.mark.parametrize("kind", ["bytes", *KINDS])
@pytest.mark.parametrize("library", ["tokenizers", "transformers"])
def test_each_token_has_the_depth_after_its_last_character(
    kind: str, library: str, email: list[tuple[str, str]]
) -> None:
    corpus = [*email[:120], *(("snippets", code) for code in SNIPPETS.values())]
    tokenizer = None if kind == "bytes" else trained(kind, corpus)
    raw = tokenizer
    if tokenizer is not None and library == "transformers":
        tokenizer = wrapped(tokenizer)
    task = CodeDepth(tokenizer, corpus, min_chars=1, max_depth=9, max_indent=9)
    batch = task.sample(task.counts["kept"], length=2500)
    assert batch.mask.any(1).all()
    by_first_tokens = {}
    for code in (code for _, code in corpus):
        if raw is None:
            ids = list(code.encode())
            ends = [i for i, char in enumerate(code, 1) for _ in char.encode()]
        else:
            encoding = raw.encode(code, add_special_tokens=False)
            ids, ends = encoding.ids, [end for _, end in encoding.offsets]
        by_first_tokens[tuple(ids[:2500])] = (code, ends)
    for row in range(len(batch)):
        keep = batch.mask[row]
        code, ends = by_first_tokens[tuple(batch.tokens[row][keep].tolist())]
        depths, indents = scan(code)
        assert batch.labels["depth"][row][keep].tolist() == [min(depths[e], 9) for e in ends][: int(keep.sum())]
        assert batch.labels["indent"][row][keep].tolist() == [min(indents[e], 9) for e in ends][: int(keep.sum())]
        assert (batch.labels["depth"][row][~keep] == -100).all()


def test_the_scanner_agrees_on_the_functions_of_a_real_package(email: list[tuple[str, str]]) -> None:
    checked = 0
    for _, code in email:
        found = nesting(code)
        assert found is not None
        assert found[0].tolist() == scan(code)[0]
        checked += max(found[0]) > 1
    assert checked > 100


def test_long_functions_are_cut_and_short_ones_padded() -> None:
    task = CodeDepth(corpus=[("a", "x = [1]"), ("b", "y = (((2)))")], min_chars=1, bos=True)
    batch = task.sample(2, length=9)
    assert batch.tokens.shape == (2, 10)
    assert (batch.tokens[:, 0] == task.vocab.index("<bos>")).all()
    assert not batch.mask[:, 0].any()
    assert sorted(batch.mask.sum(1).tolist()) == [7, 9]
    short = int(batch.mask.sum(1).argmin())
    assert (batch.tokens[short, 8:] == task.vocab.index("<pad>")).all()
    assert sorted(task.decode(batch.tokens)) == ["x = [1]", "y = (((2)"]
    assert max(batch.labels["depth"].max(), 0) == 3
    assert task.shares()["4+"] == 0.0
    assert sum(task.shares("indent").values()) == pytest.approx(1.0)


def test_bos_is_the_tokenizers_own_and_missing_ones_are_refused(email: list[tuple[str, str]]) -> None:
    raw = trained("byte_bpe", email[:50])
    task = CodeDepth(wrapped(raw), email[:50], bos=True)
    assert (task.sample(3, length=8).tokens[:, 0] == raw.token_to_id("<|endoftext|>")).all()
    assert task.d_vocab == raw.get_vocab_size()
    with pytest.raises(InputError, match="no BOS and no EOS"):
        CodeDepth(raw, email[:50], bos=True)


def test_splits_and_exclusions_keep_whole_modules_apart(email: list[tuple[str, str]]) -> None:
    task = CodeDepth(corpus=email)
    parts = task.splits({"train": 120, "test": 40}, length=64, seed=3)
    assert [len(part) for part in parts.values()] == [120, 40]
    modules = [set(part.groups.tolist()) for part in parts.values()]
    assert len(modules[0]) > 3
    assert not modules[0] & modules[1]
    fresh = next(task.stream(100, length=64, exclude=parts["test"]))
    assert not set(fresh.groups.tolist()) & modules[1]
    assert set(next(task.stream(100, length=64)).groups.tolist()) & modules[1]  # control
    again = CodeDepth(corpus=email).splits({"train": 120, "test": 40}, length=64, seed=3)
    assert again["train"].tokens.equal(parts["train"].tokens)
    assert not task.splits({"train": 120, "test": 40}, length=64, seed=4)["train"].tokens.equal(again["train"].tokens)


def test_no_function_comes_twice_in_a_sample(email: list[tuple[str, str]]) -> None:
    task = CodeDepth(corpus=email)
    n = task.counts["kept"]
    texts = task.decode(task.sample(n, length=2000).tokens)
    assert len(set(texts)) == n
    assert sorted(texts) == sorted(code for _, code in email)


def test_duplicates_up_to_white_space_and_comments_are_taken_once() -> None:
    same = ["def f(x):\n    return x\n", "def f(x):\n    # why\n    return  x\n", "def f(x):\n\n  return x"]
    task = CodeDepth(corpus=[("m", code) for code in [*same, "def g(x):\n    return x\n"]], min_chars=1)
    assert task.counts["duplicate"] == 2
    assert task.counts["kept"] == 2


def test_a_folder_gives_functions_and_methods_by_top_level_module(tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    inner = "    def inner(x):\n        return (x)\n"
    (tmp_path / "pack" / "a.py").write_text(
        f"class C:\n    @d([1])\n    def m(self):\n        return 1\n\nif 1:\n{inner}"
    )
    (tmp_path / "pack" / "b.py").write_text("def outer():\n" + inner + "    return inner\n")
    (tmp_path / "c.py").write_bytes("# -*- coding: latin-1 -*-\ndef é():\n    return 'ü'\n".encode("latin-1"))
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "binary.py").write_bytes(b"\x00\xff\xfe")
    task = CodeDepth(corpus=tmp_path, min_chars=1)
    assert task.group_names == ["c", "pack"]
    assert (task.counts["files"], task.counts["unreadable_files"], task.counts["kept"]) == (5, 2, 4)
    texts = task.decode(task.sample(4, length=100).tokens)
    assert "@d([1])\ndef m(self):\n    return 1" in texts
    assert "def inner(x):\n    return (x)" in texts
    assert "def é():\n    return 'ü'" in texts
    assert sum("inner" in text for text in texts) == 2  # not the inner function of outer once more


@pytest.mark.parametrize("packed", [False, True])
def test_code_search_net_files_group_by_repository(tmp_path: Path, packed: bool) -> None:
    rows = [
        {"repo": "a/b", "code": "def f(x):\n    return [x]\n", "language": "python"},
        {"repository_name": "c/d", "whole_func_string": "    def g(x):\n        return (x)\n"},
        {"repo": "e/f", "code": "function() {}", "language": "javascript"},
    ]
    path = tmp_path / ("python.jsonl.gz" if packed else "python.jsonl")
    text = "\n".join(map(json.dumps, rows)) + "\n\n"
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    task = CodeDepth(corpus=str(path), min_chars=1)
    assert task.group_names == ["a/b", "c/d"]
    assert task.counts["other_language"] == 1
    assert "def g(x):\n    return (x)\n" in task.decode(task.sample(2, length=60).tokens)


@pytest.mark.parametrize("kind", ["bytes", "byte_bpe", "metaspace"])
@pytest.mark.parametrize("bos", [False, True])
def test_pairs_swap_one_bracket_for_a_comma_and_are_one_level_apart(
    kind: str, bos: bool, email: list[tuple[str, str]]
) -> None:
    tokenizer = None if kind == "bytes" else wrapped(trained(kind, email))
    task = CodeDepth(tokenizer, email, bos=bos)
    pairs = task.pairs(60, length=96, seed=2)
    assert len(pairs) == 60
    rows = torch.arange(60)
    differ = (pairs.clean != pairs.corrupted) & pairs.mask
    assert (differ.sum(1) == 1).all()
    assert differ[rows, pairs.edit_pos].all()
    assert (pairs.edit_pos + 2 <= pairs.read_pos).all()
    assert pairs.label == "depth"
    for side, tokens in enumerate((pairs.clean, pairs.corrupted)):
        for row in range(60):
            text = task.decode(tokens[row : row + 1, : pairs.read_pos[row] + 1])[0]
            assert min(scan(text)[0][-1], 4) == pairs.answers[row, side]
    assert (pairs.answers[:, 0] == pairs.answers[:, 1] + 1).all()
    opened = [task.vocab[i].strip("Ġ▁ ") for i in pairs.clean[rows, pairs.edit_pos].tolist()]
    assert set(opened) <= {"(", "[", "{"}
    assert {task.vocab[i].strip("Ġ▁ ") for i in pairs.corrupted[rows, pairs.edit_pos].tolist()} == {","}
    at = 30 + int(bos)
    assert (task.pairs(5, length=96, read_pos=at).read_pos == at).all()


def test_the_standard_library_is_large_and_mostly_flat() -> None:
    task = CodeDepth()
    counts, shares = task.counts, task.shares()
    assert 5_000 < counts["kept"] < 30_000
    assert counts["functions"] == sum(
        counts[key] for key in ("too_short", "too_long", "unreadable", "duplicate", "kept")
    )
    assert counts["groups"] > 100
    assert {"json", "argparse"} <= set(task.group_names)
    assert not {"test", "idlelib.idle_test", "site-packages"} & set(task.group_names)
    assert 0.6 < shares["0"] < 0.9
    assert 0 < shares["4+"] < 0.002
    parts = task.splits({"train": 1200, "validation": 400, "test": 400}, length=64)
    scores = task.baselines(parts["train"], parts["test"])
    assert scores["majority"]["accuracy"] > 2 * scores["majority"]["balanced_accuracy"]
    assert task.digest == CodeDepth().digest


def test_seeds_decide_and_the_global_state_is_left_alone(email: list[tuple[str, str]]) -> None:
    task = CodeDepth(corpus=email)
    before = torch.get_rng_state().tolist(), np.random.get_state()[1].tobytes()  # noqa: NPY002
    first, same, other = (task.sample(20, seed=seed).tokens for seed in (1, 1, 2))
    assert first.equal(same)
    assert not first.equal(other)
    assert task.pairs(5, seed=1).clean.equal(task.pairs(5, seed=1).clean)
    assert (torch.get_rng_state().tolist(), np.random.get_state()[1].tobytes()) == before  # noqa: NPY002


def test_config_names_the_corpus_and_the_tokenizer(email: list[tuple[str, str]]) -> None:
    task = CodeDepth(corpus=STDLIB / "json")
    assert repr(make(task.config)) == repr(task)
    listed = CodeDepth(corpus=email[:5], max_depth=2)
    assert listed.digest != CodeDepth(corpus=email[:4]).digest
    assert listed.config["corpus"] == f"list:{listed.digest}"
    assert json.loads(json.dumps(listed.config)) == listed.config
    assert CodeDepth(trained("byte_bpe", email[:20]), email[:5]).config["tokenizer"] == "Tokenizer"


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda p: CodeDepth(corpus="no/such/folder"), "'no/such/folder' must be an existing folder, or a .jsonl"),
        (lambda p: CodeDepth(corpus=p), "no usable Python function.*'functions': 0"),
        (lambda p: CodeDepth(corpus=[]), "no usable Python function"),
        (lambda p: CodeDepth(corpus=7), "corpus must be 'stdlib'.*pairs of strings.*got a int"),
        (lambda p: CodeDepth(corpus=[("m", 3)]), "pairs of strings"),
        (lambda p: CodeDepth(corpus=write(p / "a.jsonl", '{"repo": "a"}\n')), "at line 1: it needs one of"),
        (lambda p: CodeDepth(corpus=write(p / "a.jsonl", '\n{"repo": "a", ')), "a.jsonl.*one JSON object per line"),
        (lambda p: CodeDepth(corpus=write(p / "a.jsonl", "[1]\n")), "can't be read as a CodeSearchNet file"),
        (lambda p: CodeDepth(corpus=write(p / "a.jsonl.gz", "not packed")), "can't be read as a CodeSearchNet file"),
        (lambda p: CodeDepth(str, [("m", "x")]), "tokenizer is a type, which doesn't give the offsets"),
        (lambda p: CodeDepth(max_depth=0, corpus=[("m", "x")]), "max_depth=0"),
        (lambda p: CodeDepth(min_chars=9, max_chars=8, corpus=[("m", "x")]), "max_chars=8"),
        (lambda p: CodeDepth(target="deep", corpus=[("m", "x")], min_chars=1), "unknown label for target"),
        (lambda p: small().sample(4), "asked for 4 different functions, but there are 3"),
        (lambda p: small().sample(0), "n=0"),
        (lambda p: small().sample(1, length=0), "length=0"),
        (lambda p: small().sample(1, exclude=torch.zeros(1, 128).long()), "exclude must be a Batch"),
        (lambda p: small().sample(2, exclude=small().sample(3)[:2]), "outside the 2 excluded modules"),
        (lambda p: small().splits({"train": 3, "test": 3}), "its modules hold"),
        (lambda p: small().splits({}), "must name the splits"),
        (lambda p: small().pairs(1, label="indent"), "pairs change the label 'depth' only"),
        (lambda p: small().pairs(9), "found . of 9 functions with a bracket"),
        (lambda p: small().pairs(1, read_pos=1), "read_pos=1.*from 2 to 127"),
        (lambda p: small().labels(torch.zeros(1, 5).long()), "labels come from the text"),
    ],
)
def test_bad_input_is_named_with_what_is_allowed(call: Any, text: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=text):
        call(tmp_path)


def small() -> CodeDepth:
    return CodeDepth(corpus=[("a", "x = f(1, 2)"), ("b", "y = 2"), ("c", "z = [3, 4]")], min_chars=1)


def test_a_batch_slices_like_any_other() -> None:
    batch = small().sample(3, length=12)
    assert isinstance(batch[:2], Batch)
    assert batch[1].groups.tolist() == [batch.groups[1].item()]
