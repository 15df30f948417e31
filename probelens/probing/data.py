"""The input of ``probe``, checked and in one shape: (n, pos, d) activations, (n, pos) labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from probelens.errors import InputError, ShapeError
from probelens.numerics.mapped import Mapped, chunks, require_finite
from probelens.numerics.tensors import class_numbers, tensor_of
from probelens.probing.splits import Split, copies_together, real_tokens


@dataclass(frozen=True, eq=False)
class Data:
    """Activations, labels and masks in one shape."""

    tensors: dict[str, Tensor]  # activations by site, each (n, pos, d)
    labels: dict[str, Tensor]  # classes by label, numbered from 0, each (n, pos)
    numbers: dict[str, Tensor]  # numeric labels by label, each (n, pos)
    mask: Tensor  # where labels count (n, pos)
    groups: Tensor  # what a split keeps together, equal sequences included (n,)
    tokens: Tensor | None  # of the whole sequences, where known (n, T)
    at: Tensor | None  # positions of the activations among these, None for all (pos,) or, one of each, (n, 1)
    layers: dict[str, int]  # place of each site on the layer axis
    flat: bool  # whether activations were given as (n, d): one position each
    ids: dict[str, Tensor]  # the ids of these classes, ascending, each (class,)

    @classmethod
    def of(cls, acts: Any, labels: Any, groups: Any, mask: Any, tokens: Any) -> Data:
        """Check everything and bring it into one shape; the arguments are those of ``probe``."""
        tensors, layers, kept = _sites(acts)
        copies = getattr(acts, "copies", None)
        whole = None if tokens is None else tensor_of("tokens", tokens).cpu()
        if kept is not None:
            mask = acts.mask if mask is None else mask
            whole = acts.tokens if whole is None else whole
        flat, shape = _shape(tensors)
        if kept is not None and kept.ndim == 1 and len(kept) > 1 and bool((kept.diff() <= 0).any()):
            raise InputError(
                f"the activations are of positions {kept[:8].tolist()}, which aren't ascending, so labels could be meant in "
                "either order. Collect them in ascending order."
            )

        def cut(values: Any) -> Tensor:
            """Labels at all positions of sequences of which only some were collected, or of whole sequences."""
            values = tensor_of("labels", values).cpu()
            if tuple(values.shape) == shape[:1] and not flat:
                return values[:, None].expand(shape)
            if kept is None or values.ndim != 2 or tuple(values.shape) == shape or len(values) != shape[0]:
                return values
            if values.shape[1] <= int(kept.max()) or (acts.tokens is not None and values.shape != acts.tokens.shape):
                return values
            return values[:, kept] if kept.ndim == 1 else values.gather(1, kept)

        mask = torch.ones(shape, dtype=torch.bool) if mask is None else cut(mask).bool()
        if tuple(mask.shape) != shape:
            raise ShapeError(
                f"mask has shape {tuple(mask.shape)}, the activations {shape}: give one value per position"
            )
        if not bool(mask.any()):
            raise InputError("the mask is False everywhere: no label counts")
        named = dict(labels) if isinstance(labels, Mapping) else {"label": labels}
        if not named:
            raise InputError("there are no labels to probe: labels is empty")
        classes, numbers, ids = dict[str, Tensor](), dict[str, Tensor](), dict[str, Tensor]()
        for name, values in named.items():
            y = _label(str(name), cut(values), mask, shape)
            if y.is_floating_point():
                numbers[str(name)] = y
                continue
            classes[str(name)], ids[str(name)] = class_numbers(y, mask)
        groups = torch.arange(shape[0]) if groups is None else tensor_of("groups", groups).cpu()
        if groups.shape != (shape[0],):
            raise ShapeError(f"groups has shape {tuple(groups.shape)}; it must be ({shape[0]},), one per sequence")
        seen, at = _tokens(whole, kept, flat, shape)
        if copies is not None:
            groups = copies_together(copies[:, None], groups)
        elif whole is not None:
            counts = mask[:, None].expand(whole.shape) if flat else mask
            if at is not None:
                counts = _spread(mask, at, whole.shape)
            groups = copies_together(real_tokens(whole, counts), groups)
        prepared = {site: _prepared(site, x, mask, flat) for site, x in tensors.items()}
        if flat:
            mask = mask[:, None]
            classes, numbers = ({k: v[:, None] for k, v in some.items()} for some in (classes, numbers))
        return cls(prepared, classes, numbers, mask, groups, seen, at, layers, flat, ids)

    def spread(self, values: Tensor) -> Tensor:
        """Labels or a mask at all positions of the tokens; 0 and False where nothing was collected. (n, T)"""
        if self.at is None or self.tokens is None:
            return values
        return _spread(values, self.at, self.tokens.shape)

    def like(self, acts: Any) -> dict[str, Tensor]:
        """Activations of another model, checked to be of the same sites and sequences. each (n, pos, d)"""
        tensors, _, _ = _sites(acts)
        if set(tensors) != set(self.tensors):
            raise InputError(
                f"untrained has the sites {sorted(tensors)}, acts {sorted(self.tensors)}: collect the same ones"
            )
        flat, shape = _shape(tensors)
        mask = self.mask[:, 0] if self.flat else self.mask
        if flat != self.flat or shape != tuple(mask.shape):
            raise ShapeError(
                f"untrained has (n, pos) = {shape}, acts {tuple(mask.shape)}: collect both on the same sequences"
            )
        return {site: _prepared(site, x, mask, flat) for site, x in tensors.items()}

    def check(self, split: Split) -> None:
        """Raise where a side of a split has no label that counts, or test has too little for an interval."""
        for side, rows, least in (("training", split.train, 1), ("validation", split.val, 1), ("test", split.test, 2)):
            found = int(self.mask[rows].any(1).sum())
            if found < least:
                raise InputError(
                    f"only {found} {side} sequences have a label that counts, of {len(self.mask)} in all; "
                    f"at least {least} needed. Give more sequences, other splits, or another mask."
                )


def _spread(values: Tensor, at: Tensor, shape: Sequence[int]) -> Tensor:
    """Values at some positions, of all examples (pos,) or one of each (n, 1), among zeros. (n, T)"""
    out = torch.zeros(tuple(shape), dtype=values.dtype)
    if at.ndim == 2:
        return out.scatter(1, at, values)
    out[:, at] = values
    return out


def _tokens(
    tokens: Tensor | None, kept: Tensor | None, flat: bool, shape: tuple[int, ...]
) -> tuple[Tensor | None, Tensor | None]:
    """Tokens for the baselines, and which of their positions the activations are of; checked."""
    if tokens is None:
        return None, None
    if tokens.ndim != 2 or len(tokens) != shape[0] or not tokens.shape[1]:
        raise ShapeError(
            f"tokens have shape {tuple(tokens.shape)}, the activations {shape}: give (n, pos), or for activations (n, d) the "
            "whole sequences"
        )
    if tokens.is_floating_point():
        raise InputError(f"tokens must be integers, got {tokens.dtype}")
    if flat:
        # The position of such a row in its sequence isn't known, so tokens only keep copies together.
        return None, None
    if tokens.shape[1] == shape[1] and (kept is None or kept.ndim == 1):
        return tokens, None
    if kept is None or int(kept.max()) >= tokens.shape[1]:
        raise ShapeError(
            f"tokens have shape {tuple(tokens.shape)}, the activations {shape}: give the tokens at the same positions, or "
            "of the whole sequences"
        )
    return tokens, kept


def _sites(acts: Any) -> tuple[dict[str, Tensor], dict[str, int], Tensor | None]:
    """Tensors and layers by site; and which positions were collected, for ``Activations``."""
    layers, kept = dict[str, int](), None
    if isinstance(acts, Tensor):
        tensors = {"activations": acts}
    elif isinstance(acts, Mapping):
        tensors = dict(acts)
    elif hasattr(acts, "tensors"):
        tensors, layers = dict(acts.tensors), dict(acts.layers)
        length = next(iter(tensors.values())).shape[1] if tensors else 0
        kept = torch.arange(length) if acts.pos is None else acts.pos.cpu()
    else:
        raise InputError(f"acts must be Activations, a dict of tensors or a tensor, got {type(acts).__name__}")
    if not tensors:
        raise InputError("there are no activations to probe: acts is empty")
    return tensors, layers, kept


def _shape(tensors: Mapping[str, Tensor]) -> tuple[bool, tuple[int, ...]]:
    """Whether activations are (n, d), and their shape without d."""
    flat = all(x.ndim == 2 for x in tensors.values())
    lead = {tuple(x.shape[:1] if flat else x.shape[:2]) for x in tensors.values()}
    if len(lead) != 1 or any(x.ndim < 2 for x in tensors.values()):
        raise ShapeError(f"all sites must have the same (n, pos), found {sorted(lead)}")
    return flat, lead.pop()


def _label(name: str, y: Tensor, mask: Tensor, shape: tuple[int, ...]) -> Tensor:
    """One label, checked: class ids as int64, numbers as float64."""
    if tuple(y.shape) != shape:
        raise ShapeError(
            f"labels {name!r} have shape {tuple(y.shape)}, the activations {shape}: give one label per position, or one per "
            "example"
        )
    kept = y[mask]
    if y.is_floating_point():
        if not bool(torch.isfinite(kept).all()):
            raise InputError(f"labels {name!r} have NaN or infinite values where the mask is True")
        if bool((kept == kept[0]).all()):
            raise InputError(f"labels {name!r} are {float(kept[0]):g} everywhere: there is nothing to probe")
        return y.double()
    if int(kept.min()) < 0:
        raise InputError(f"labels {name!r} have negative class ids where the mask is True")
    if len(kept.unique()) < 2:
        raise InputError(f"labels {name!r} have one class only ({int(kept[0])}): there is nothing to probe")
    return y.long()


def _prepared(site: str, x: Tensor, mask: Tensor, flat: bool) -> Tensor:
    """One site's activations, checked. (n, pos, d)"""
    x = x.detach().cpu()
    if x.is_complex():
        raise InputError(f"activations at {site!r} are complex. Give real numbers: torch.view_as_real(x).flatten(-2)")
    if Mapped.of(x) is None:  # what lies in a file is checked when it is read
        for rows, part in chunks(x):
            require_finite(part[mask[rows]], site)
    if flat:
        return x[:, None]
    return x.flatten(2) if x.ndim > 3 else x
