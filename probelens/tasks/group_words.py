"""GroupWords: the running product of a word over a finite group, for all groups with one code."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

import numpy as np

from probelens.errors import InputError
from probelens.tasks.base import Task
from probelens.tasks.drawing.arguments import choice

__all__ = ["GroupWords"]

_LARGEST = {"Z": 256, "S": 6, "A": 6}  # S6 has 720 elements, a table of half a million products
_SETS = ("all", "nontrivial", "transpositions", "adjacent", "cycles", "step")


class GroupWords(Task):
    """Running product of a word over a finite group: y_t = g_1 g_2 … g_t.

    The generators g_t are drawn uniformly from a stated set. The set decides what the position alone tells: with all
    elements y_t is uniform at every t; transpositions alternate the sign, so that t tells half of S_n.

    Elements are written as permutations in one-line notation ("021" sends 0→0, 1→2, 2→1), or as residues for Z_n. A
    product of permutations acts left to right: first g_1, then g_2.

    Labels:
        - ``state``: The element. n classes, in lexicographic order, so the identity is class 0.
        - ``sign``: Even or odd (S_n only). It is the running parity of the signs, blind to the rest.
        - ``mod_sign``: What is left of the element once the sign is known (S_n, n ≥ 3): write y = a sʲ with a even, s
          the swap of the first two points and j the sign; the label is a. n!/2 classes, 3 for S3, where it is the
          rotation. (sign, mod_sign) and state determine each other, and the sign steers which way a turns.

    Pairs:
        One generator of the first half is replaced by another. For ``label="sign"`` by one of the other sign.

    Args:
        group: "Z2" … "Z256", "S2" … "S6", "A3" … "A6".
        generators: "all" elements; "nontrivial" leaves out the identity; "transpositions" and "adjacent"
            transpositions (S_n); "cycles", the 3-cycles (A_n); "step", +1 and −1 (Z_n); or a list of element names.
        target: Label that models are trained on.
        bos: Put a BOS token in front.

    Attributes:
        elements: Names of the elements, in the order of their class ids.
        table: Class id of each product. (n, n)

    Raises:
        InputError: An unknown group or generator, generators that don't reach the whole group, or a label the group
            lacks.

    Source:
        Word problems as state tracking: Liu et al. 2023, arXiv 2210.10749; Merrill et al. 2024, arXiv 2404.08819.

    Examples:
        >>> task = GroupWords("S3", generators="transpositions")
        >>> task.vocab, task.n_classes
        (('021', '102', '210'), {'state': 6, 'sign': 2, 'mod_sign': 3})
        >>> import torch
        >>> labels = task.labels(torch.tensor([[0, 1, 1]]))
        >>> [task.elements[i] for i in labels["state"][0]]
        ['021', '120', '021']
    """

    def __init__(
        self, group: str, generators: str | Sequence[str] = "all", target: str = "state", bos: bool = False
    ) -> None:
        self.group = group
        self.generators = generators if isinstance(generators, str) else tuple(generators)
        kind, n = _family(group)
        elements, table, signs = _residues(n) if kind == "Z" else _permutations(n, even=kind == "A")
        self.elements = tuple("".join(map(str, e)) for e in elements)
        self.table = table.astype(np.int16)
        self._steps = np.array(self._generators(kind, elements), dtype=np.int16)
        self._by_step = np.ascontiguousarray(self.table[:, self._steps], dtype=np.intp)
        reached = _reach(self._by_step)
        if reached < len(elements):
            raise InputError(
                f"generators {self.generators!r} reach {reached} of the {len(elements)} elements of {group}. "
                "Add generators, or take the smaller group."
            )
        classes: dict[str, Sequence[str]] = {"state": self.elements}
        self._parts: dict[str, np.ndarray] = {}
        if kind == "S":
            even = np.flatnonzero(signs == 0)
            swap = self.elements.index("".join(map(str, [1, 0, *range(2, n)])))
            without = np.where(signs == 0, np.arange(len(signs)), table[:, swap])  # y s⁻¹ where y is odd
            self._parts = {"sign": signs, "mod_sign": np.searchsorted(even, without)}
            classes["sign"] = ("even", "odd")
            if n >= 3:
                classes["mod_sign"] = [self.elements[i] for i in even]
        names = [self.elements[i] for i in self._steps]
        super().__init__(group, names, classes, target=target, bos=bos)

    def draw(self, n: int, length: int, rng: np.random.Generator) -> np.ndarray:
        return rng.integers(0, len(self._steps), (n, length), dtype=np.int16)

    def annotate(self, symbols: np.ndarray) -> dict[str, np.ndarray]:
        n, length = symbols.shape
        steps = np.ascontiguousarray(symbols.T, dtype=np.intp)
        products = np.empty((length, n), dtype=np.intp)
        product, flat, width = np.zeros(n, dtype=np.intp), self._by_step.ravel(), len(self._steps)
        for t in range(length):
            product = flat.take(product * width + steps[t])
            products[t] = product
        state = products.T
        return {label: state if label == "state" else self._parts[label][state] for label in self.label_names}

    def n_strings(self, length: int) -> int:
        return len(self._steps) ** length

    def _generators(self, kind: str, elements: list[tuple[int, ...]]) -> list[int] | np.ndarray:
        if not isinstance(self.generators, str):
            if not self.generators or len(set(self.generators)) < len(self.generators):
                raise InputError(f"generators={self.generators!r}; list at least one element, each only once.")
            return [self.elements.index(choice(f"element of {self.group}", g, self.elements)) for g in self.generators]
        name = choice("generators", self.generators, _SETS)
        fits = {"transpositions": "S", "adjacent": "S", "cycles": "A", "step": "Z"}.get(name, kind)
        if fits != kind:
            raise InputError(
                f"generators={name!r} are defined for {fits}_n, not for {self.group}. "
                "Take 'all', 'nontrivial' or a list of elements."
            )
        if name == "step":
            return [1, len(elements) - 1] if len(elements) > 2 else [1]
        if name in ("all", "nontrivial"):
            return np.arange(name == "nontrivial", len(elements))
        moved = [[i for i, image in enumerate(e) if i != image] for e in elements]
        if name == "cycles":
            return [i for i, points in enumerate(moved) if len(points) == 3]
        swaps = [i for i, points in enumerate(moved) if len(points) == 2]
        return swaps if name == "transpositions" else [i for i in swaps if moved[i][1] == moved[i][0] + 1]


def _family(group: str) -> tuple[str, int]:
    match = re.fullmatch(r"([ZSA])(\d{1,3})", group) if isinstance(group, str) else None
    if match:
        kind, n = match[1], int(match[2])
        if (3 if kind == "A" else 2) <= n <= _LARGEST[kind]:
            return kind, n
    raise InputError(f"unknown group {group!r}. Allowed: 'Z2' to 'Z256', 'S2' to 'S6', 'A3' to 'A6'.")


# Elements in lexicographic order, table of products (first the row, then the column), parity of each element.
Group = tuple[list[tuple[int, ...]], np.ndarray, np.ndarray]


def _residues(n: int) -> Group:
    residues = np.arange(n)
    return [(i,) for i in range(n)], np.add.outer(residues, residues) % n, np.zeros(n, dtype=np.int64)


def _permutations(n: int, even: bool) -> Group:
    points = np.array(list(itertools.permutations(range(n))))
    inversions = [points[:, i] > points[:, j] for i, j in itertools.combinations(range(n), 2)]
    signs = np.sum(inversions, axis=0) % 2
    if even:
        points, signs = points[signs == 0], signs[signs == 0]
    place = n ** np.arange(n)[::-1]
    codes = points @ place
    # Row i, column j: the point p goes to points[j][points[i][p]].
    products = points[np.arange(len(points))[None, :, None], points[:, None, :]] @ place
    return [tuple(p) for p in points.tolist()], np.searchsorted(codes, products), signs


def _reach(by_step: np.ndarray) -> int:
    """How many elements products of the generators reach."""
    seen, frontier = {0}, [0]
    while frontier:
        frontier = [e for e in set(by_step[frontier].ravel().tolist()) if e not in seen]
        seen.update(frontier)
    return len(seen)
