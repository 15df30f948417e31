"""CodeDepth: nesting depth of each token of real Python code, in brackets and in indented blocks."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from probelens.errors import InputError
from probelens.numerics.tensors import whole_number
from probelens.tasks.base import Task
from probelens.tasks.code import corpus as _corpus
from probelens.tasks.code.encoding import encoder_for
from probelens.tasks.data import IGNORE, Batch, Exclude, parts_of
from probelens.tasks.drawing.arguments import rng_from, sizes_of
from probelens.tasks.pairs import PatchPairs

__all__ = ["CodeDepth"]


class CodeDepth(Task):
    """Nesting depth at every token of Python functions, for any tokenizer.

    Sequences are functions and methods, cut after ``length`` tokens or padded to them; the mask is False on padding.
    ``groups`` holds the module (or repository) of each, and `splits` and ``exclude`` keep whole modules apart.
    Functions that differ only in white space and comment lines are taken once.

    Labels are those of ``tokenize`` after the token's last character, so a token such as "):" counts as closed. Three
    quarters of all characters are at depth 0 and fewer than 1 in 2,000 at 4 or more: report balanced accuracy. The
    default corpus differs between Python versions; ``digest`` says which one it was.

    Labels:
        - ``depth``: Open ( [ { outside strings and comments; the last class also holds what is deeper.
        - ``indent``: Open indented blocks; the last class also holds what is deeper.

    Pairs:
        A token that is one opening bracket becomes a comma. They are read while that bracket is open and on
        the same line, as far right as that allows, where the corrupted depth is one lower. Both are readable
        by ``tokenize`` up to there; the corrupted text is in general no valid program.

    Args:
        tokenizer: A fast tokenizer of transformers, a ``tokenizers.Tokenizer``, or None for UTF-8 bytes.
        corpus: "stdlib", the standard library of the running Python without its tests; a folder of Python files,
            grouped by the first folder or file in it; a .jsonl or .jsonl.gz file with the fields of CodeSearchNet,
            grouped by repository; or pairs (group, source text).
        max_depth: The last class, which also holds greater depths.
        max_indent: The last class, which also holds greater indents.
        min_chars: Shorter functions are left out.
        max_chars: Longer functions are left out.
        target: Label that models are trained on.
        bos: Put the tokenizer's BOS token in front, or its EOS token where it has no BOS.

    Attributes:
        digest: Hash of the functions, in order.

    Raises:
        InputError: A corpus that can't be read or holds no function, a slow tokenizer, or an argument out of range.

    Source:
        CodeSearchNet: Husain et al. 2019, arXiv 1909.09436.

    Examples:
        >>> task = CodeDepth(corpus=[("m", "def f(x):\\n    return g[x]")], min_chars=1)
        >>> batch = task.sample(1, length=25)
        >>> "".join(str(d.item()) for d in batch.labels["depth"][0])
        '0000011000000000000000110'
        >>> "".join(str(d.item()) for d in batch.labels["indent"][0])
        '0000000000000111111111111'
    """

    def __init__(
        self,
        tokenizer: Any = None,
        corpus: _corpus.Source = _corpus.STDLIB,
        max_depth: int = 4,
        max_indent: int = 4,
        min_chars: int = 80,
        max_chars: int = 2000,
        target: str = "depth",
        bos: bool = False,
    ) -> None:
        self.tokenizer, self.corpus = tokenizer, corpus
        self.max_depth = whole_number("max_depth", max_depth)
        self.max_indent = whole_number("max_indent", max_indent)
        self.min_chars = whole_number("min_chars", min_chars)
        self.max_chars = whole_number("max_chars", max_chars, self.min_chars)
        self._encoder = encoder_for(tokenizer)
        if bos and self._encoder.bos is None:
            raise InputError("bos=True, but the tokenizer has no BOS and no EOS token. Use bos=False.")
        classes = {
            "depth": [*map(str, range(self.max_depth)), f"{self.max_depth}+"],
            "indent": [*map(str, range(self.max_indent)), f"{self.max_indent}+"],
        }
        super().__init__("code_depth", self._encoder.vocab, classes, target=target)
        self.bos = bool(bos)
        self._corpus = _corpus.load(corpus, self.min_chars, self.max_chars)
        self._groups = np.array(self._corpus.groups)
        self._encoded: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    @property
    def n_symbols(self) -> int:
        return len(self.vocab)

    @property
    def counts(self) -> dict[str, int]:
        """Files and functions read, left out by reason, and kept."""
        return dict(self._corpus.counts)

    @property
    def digest(self) -> str:
        """Hash of the text that the strings are cut from, by which a config identifies its corpus."""
        return self._corpus.digest

    @property
    def group_names(self) -> list[str]:
        """Module or repository by the number that ``groups`` has for it."""
        return list(self._corpus.names)

    def shares(self, label: str | None = None) -> dict[str, float]:
        """Fraction of all characters in each class of a label (the target when left out).

        Args:
            label: Label; the target when left out.

        Returns:
            Fraction by class name; they add up to 1.
        """
        label = self._label(label)
        levels = np.concatenate([self._levels(label, index)[1:] for index in range(len(self._groups))])
        counts = np.bincount(levels, minlength=self.n_classes[label])
        return dict(zip(self.class_names(label), (counts / counts.sum()).tolist(), strict=True))

    def draw(self, n: int, length: int, rng: np.random.Generator) -> np.ndarray:
        return self._fresh(n, length, rng, None).tokens.numpy()[:, int(self.bos) :]

    def annotate(self, symbols: np.ndarray) -> dict[str, np.ndarray]:
        raise InputError(
            "code_depth labels come from the text, which token ids don't always give back. "
            "Make a CodeDepth whose corpus is [(group, text), …] and sample from it."
        )

    def sample(self, n: int, length: int = 128, seed: int = 0, *, exclude: Exclude | None = None) -> Batch:
        """Different functions in random order, as `Task.sample`.

        Args:
            n: Number of functions.
            length: Tokens of each, BOS not counted; longer ones are cut, shorter ones padded.
            seed: As in `Task.sample`.
            exclude: Batches of this task; no function of any module in them is drawn.

        Returns:
            Tokens (n, length + bos), labels, the mask, and the module of each function as its group.

        Raises:
            InputError: More functions asked for than there are, or an exclusion that isn't a Batch.
        """
        return super().sample(n, length, seed, exclude=exclude)

    def splits(self, sizes: Mapping[str, int], length: int = 128, seed: int = 0) -> dict[str, Batch]:
        """Batches that share no module: a hash of its name puts each module into one split.

        Args:
            sizes: Number of functions per split; modules are dealt out in proportion.
            length: Tokens of each function, BOS not counted.
            seed: Decides the hash and the choice of functions.

        Returns:
            One batch per split.

        Raises:
            InputError: A split whose modules hold fewer functions than asked for; the message says how many.
        """
        length = whole_number("length", length)
        counts = sizes_of(sizes)
        rng = rng_from(seed, "splits", length)
        edges = np.cumsum([0.0, *counts.values()]) / sum(counts.values())
        place = np.array([_fraction(f"{seed}/{name}") for name in self._corpus.names])
        home = np.searchsorted(edges, place, side="right")[self._groups] - 1
        out = {}
        for i, (name, size) in enumerate(counts.items()):
            mine = np.flatnonzero(home == i)
            if size > len(mine):
                raise InputError(
                    f"split {name!r} asks for {size} functions, but its modules hold {len(mine)} of the "
                    f"{len(home)} in the corpus. Ask for fewer, or change the seed."
                )
            out[name] = self._code_batch(rng.permutation(mine)[:size], length)
        return out

    def pairs(
        self, n: int, length: int = 128, seed: int = 0, *, label: str | None = None, read_pos: int | None = None
    ) -> PatchPairs:
        """Pairs in which one opening bracket becomes a comma, with a mask for padding.

        Args:
            n: Number of pairs, each from another function.
            length, seed: As for ``CodeDepth.sample``.
            label: "depth"; no other label changes.
            read_pos: Where to read, BOS counted. When left out, the last position on the bracket's line at
                which it is still open, which differs between pairs.

        Returns:
            The pairs, at least two tokens between edit_pos and read_pos.

        Raises:
            InputError: A label other than "depth", a tokenizer without a comma, or too few such places.
        """
        n, length = whole_number("n", n), whole_number("length", length, 3)
        if self._label(label) != "depth":
            raise InputError(f"pairs change the label 'depth' only, not {self._label(label)!r}. Pass label='depth'.")
        if read_pos is not None:
            read_pos = whole_number("read_pos", read_pos, self.bos + 2, self.bos + length - 1) - self.bos
        rng = rng_from(seed, "pairs", length)
        chosen: list[tuple[int, int, int, int]] = []
        for index in rng.permutation(len(self._corpus.codes)).tolist():
            places = self._places(index, length, read_pos)
            if places:
                chosen.append((index, *places[int(rng.integers(len(places)))]))
            if len(chosen) == n:
                break
        else:
            raise InputError(
                f"found {len(chosen)} of {n} functions with a bracket to edit and a place to read it. "
                "Ask for fewer, use a longer length, or leave read_pos out."
            )
        batch = self._code_batch(np.array([row[0] for row in chosen]), length)
        edit, at, comma = (torch.tensor(column) for column in list(zip(*chosen, strict=True))[1:])
        edit, at, rows = edit + self.bos, at + self.bos, torch.arange(n)
        corrupted = batch.tokens.clone()
        corrupted[rows, edit] = comma
        right = batch.labels["depth"][rows, at]
        answers = torch.stack([right, right - 1], dim=1)
        return PatchPairs(batch.tokens, corrupted, edit, at, answers, batch.mask, "depth")

    def decode(self, tokens: Tensor) -> list[str]:
        """The text of each sequence, without padding and BOS.

        Args:
            tokens: Token ids. (batch, pos)

        Returns:
            One text per sequence.
        """
        tokens = Batch(tokens).tokens.cpu()
        ends = ((tokens != self._encoder.pad) * torch.arange(1, tokens.shape[1] + 1)).amax(1)
        rows = zip(tokens.tolist(), ends.tolist(), strict=True)
        return [self._encoder.decode(row[int(self.bos) : end]) for row, end in rows]

    def _arguments(self) -> dict[str, Any]:
        arguments = super()._arguments()
        if self.tokenizer is not None:
            name = getattr(self.tokenizer, "name_or_path", "")
            arguments["tokenizer"] = name or type(self.tokenizer).__name__
        if isinstance(self.corpus, os.PathLike):
            arguments["corpus"] = os.fspath(self.corpus)
        elif not isinstance(self.corpus, str):
            arguments["corpus"] = f"list:{self.digest}"
        return arguments

    def _hashes(self, exclude: Exclude | None, length: int) -> np.ndarray | None:
        parts = [part for part in parts_of(exclude) if isinstance(part, Batch)]
        if len(parts) < len(parts_of(exclude)):
            raise InputError("code_depth excludes by module, so exclude must be a Batch or several of them.")
        return np.unique(np.concatenate([part.groups.cpu().numpy() for part in parts])) if parts else None

    def _fresh(self, n: int, length: int, rng: np.random.Generator, hashes: np.ndarray | None) -> Batch:
        left = np.arange(len(self._groups))
        if hashes is not None:
            left = left[~np.isin(self._groups, hashes)]
        if n > len(left):
            raise InputError(
                f"asked for {n} different functions, but there are {len(left)}"
                f"{'' if hashes is None else f' outside the {len(hashes)} excluded modules'}. Ask for fewer."
            )
        return self._code_batch(rng.choice(left, n, replace=False), length)

    def _levels(self, label: str, index: int) -> np.ndarray:
        levels = self._corpus.depths if label == "depth" else self._corpus.indents
        return levels[index].clip(0, self.n_classes[label] - 1)

    def _ids(self, indices: Sequence[int]) -> list[tuple[np.ndarray, np.ndarray]]:
        new = [i for i in indices if i not in self._encoded]
        if new:
            self._encoded.update(zip(new, self._encoder([self._corpus.codes[i] for i in new]), strict=True))
        return [self._encoded[i] for i in indices]

    def _code_batch(self, indices: np.ndarray, length: int) -> Batch:
        shape = (len(indices), length + self.bos)
        tokens, mask = torch.full(shape, self._encoder.pad), torch.zeros(shape, dtype=torch.bool)
        labels = {label: torch.full(shape, IGNORE) for label in self.label_names}
        if self.bos and self._encoder.bos is not None:
            tokens[:, 0] = self._encoder.bos
        for row, (index, (ids, ends)) in enumerate(zip(indices.tolist(), self._ids(indices.tolist()), strict=True)):
            filled = slice(int(self.bos), int(self.bos) + min(len(ids), length))
            tokens[row, filled] = torch.from_numpy(ids[:length])
            mask[row, filled] = True
            for label, values in labels.items():
                values[row, filled] = torch.from_numpy(self._levels(label, index)[ends[:length]]).long()
        return Batch(tokens, labels, mask, torch.from_numpy(self._groups[indices]))

    def _places(self, index: int, length: int, read: int | None) -> list[tuple[int, int, int]]:
        """(edit, read, id of the comma) for each bracket of a function that a pair can be made of."""
        code, levels = self._corpus.codes[index], self._corpus.depths[index]
        ids, ends = self._ids([index])[0]
        ids, ends = ids[:length], ends[:length]
        starts = np.concatenate([[0], ends[:-1]])
        depth = levels[ends]
        out = []
        for edit in np.flatnonzero(depth > levels[starts]).tolist():
            text = code[starts[edit] : ends[edit]]
            if text.strip(" ") not in ("(", "[", "{"):
                continue
            last = edit
            while (
                last + 1 < len(ids)
                and levels[starts[last + 1] : ends[last + 1] + 1].min() >= depth[edit]
                and "\n" not in code[starts[last + 1] : ends[last + 1]]
            ):
                last += 1
            at = last if read is None else read
            if edit + 2 <= at <= last and depth[at] <= self.max_depth:
                out.append((edit, at, self._comma(text.startswith(" "))))
        return out

    def _comma(self, spaced: bool) -> int:
        """Id of a comma, with the space before it if the bracket it replaces has one."""
        for comma in (" ,", ",") if spaced else (",",):
            # Alone at the start of a text some tokenizers make it another token than after a word.
            for word in ("x", "0", ")"):
                ids, ends = self._encoder([f"{word}{comma}{word}"])[0]
                spans = list(zip([0, *ends], ends, strict=False))
                if (1, 1 + len(comma)) in spans:
                    return int(ids[spans.index((1, 1 + len(comma)))])
        raise InputError("the tokenizer has no token for ',', which pairs put in place of a bracket.")


def _fraction(text: str) -> float:
    """A number in [0, 1) that only depends on the text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big") / 2**56
