"""Sites: from a shorthand such as "resid_post" to hook point names, and each name's layer."""

from __future__ import annotations

from collections.abc import Iterable

from probelens.errors import InputError, UnknownHookError, nearest
from probelens.hooks.model import HookedModel

__all__ = ["LAYER_AXIS", "Sites", "expand", "layer_of"]

LAYER_AXIS = "layers"
"""The spec of the layer axis: what enters block 0, then what each block returns."""
Sites = str | Iterable[str]
"""What names sites: a shorthand, a name, a glob, or several of these; see `expand`."""


def need_wrapped(model: object) -> None:
    """Refuse what isn't a wrapped model; forgetting ``pl.wrap`` is the first slip there is.

    Args:
        model: What was given as one.

    Raises:
        InputError: Anything without hook points.
    """
    if not hasattr(model, "hook_dict"):
        raise InputError(
            f"expected a wrapped model, got a {type(model).__name__}. Wrap a module with probelens.wrap(module), "
            "or load one with probelens.load(name)"
        )


def expand(model: HookedModel, sites: Sites) -> list[str]:
    """The hook point names that ``sites`` means.

    Args:
        model: The wrapped model.
        sites: A shorthand that stands for every layer ("resid_pre", "resid_post", "mixer_out",
            "attn_out", …), "layers" for the layer axis (the residual entering block 0 and
            resid_post of every block), a full name, a glob, or a list of these.

    Returns:
        Names, each once: those of one shorthand or glob in the order of the forward pass, several as listed.

    Raises:
        UnknownHookError: Something that fits no hook point.
        InputError: An empty list.
    """
    need_wrapped(model)
    if isinstance(sites, str):
        return _one(model, sites)
    if not isinstance(sites, Iterable):
        raise InputError(
            f"sites must be a name, a shorthand such as 'resid_post' or a list of these, got {sites!r}"
        )
    names = [name for site in sites for name in _one(model, site)]
    if not names:
        raise InputError("sites is an empty list. Give a shorthand such as 'resid_post', or names")
    return list(dict.fromkeys(names))


def _one(model: HookedModel, site: str) -> list[str]:
    if not isinstance(site, str):
        raise UnknownHookError(f"a site is a string, got {site!r}")
    points = model.hook_dict
    if site == LAYER_AXIS:
        return ["blocks.0.hook_resid_pre", *_one(model, "resid_post")]
    if model.alias(site) in points:
        return [model.alias(site)]
    tail = site if site.startswith("hook_") else f"hook_{site}"
    found = [n for n in points if n.startswith("blocks.") and n.split(".", 2)[2] == tail]
    found += [p.name for p in points.values() if any(a.split(".", 2)[-1] == tail for a in p.aliases)]
    if not found:
        found = [n for n in points if n.startswith("blocks.") and n.rsplit(".", 1)[1] == tail]
        owners = {n.split(".")[2] for n in found}
        if len(owners) > 1:
            raise UnknownHookError(
                f"site {site!r} fits points of {sorted(owners)}: say which, for example "
                f"'blocks.*.{sorted(owners)[0]}.{tail}'"
            )
    if not found and tail in points:
        found = [tail]
    if found:
        return list(dict.fromkeys(found))
    if any(c in site for c in "*?[.") or site in points:
        return [p.name for p in model.match(site)[0]]
    short = [LAYER_AXIS, *sorted({n.rsplit(".", 1)[-1].removeprefix("hook_") for n in points})]
    reason = model.adapter.absent(f"blocks.0.{tail}")
    raise UnknownHookError(
        f"site {site!r} not found in this {type(model.module).__name__}{f': {reason}' if reason else ''}. "
        f"Nearest: {nearest(site, short) or short[:5]}. All names: model.hook_points()"
    )


def layer_of(name: str, model: HookedModel | int) -> int:
    """Where a point stands on the layer axis: −1 for the embedding, l for block l, n after the last.

    The residual entering block 0 is the embedding's; the one entering block l is block l−1's output.

    Args:
        name: Name of a hook point; a module path such as "transformer.h.1.mlp.hook_out" counts as part of
            its block, and what stands before the blocks in the module as part of the embedding.
        model: The wrapped model, or for canonical names its number of blocks.

    Returns:
        From −1 to the number of blocks.

    Raises:
        UnknownHookError: A name that the model doesn't have.

    Examples:
        >>> layer_of("blocks.0.hook_resid_pre", 4), layer_of("blocks.3.hook_resid_post", 4)
        (-1, 3)
    """
    if not isinstance(model, int):
        name, n_layers = model.alias(name), model.cfg.n_layers
        if name not in model.hook_dict:
            return _layer_of_module(name, model)
    else:
        n_layers = model
    parts = name.split(".")
    if parts[0] == "blocks" and len(parts) > 2 and parts[1].isdigit():
        return int(parts[1]) - (parts[2] == "hook_resid_pre")
    return -1 if parts[0] in ("hook_embed", "embed", "hook_pos_embed") else n_layers


def _layer_of_module(name: str, model: HookedModel) -> int:
    point, adapter = model.point(name), model.adapter
    path, entering = point.module, point.site is not None and point.site.side == "in"
    inside = adapter.blocks_with(path)
    if inside:
        return inside[0] - 1 if entering and path == adapter.blocks[inside[0]] else inside[-1]
    for part, layer in (("embed", -1), ("ln_final", model.cfg.n_layers), ("unembed", model.cfg.n_layers)):
        if adapter.parts.get(part) == path:
            return layer
    if not path or any(block.startswith(f"{path}.") for block in adapter.blocks):
        return -1 if entering else model.cfg.n_layers
    if path.split(".")[0] in ("embed", "pos_embed", "hook_pos_embed"):
        return -1
    paths = [found for found, _ in adapter.module.named_modules()]
    blocks = [paths.index(block) for block in adapter.blocks if block in paths]
    before = path in paths and bool(blocks) and paths.index(path) < min(blocks)
    return -1 if before else model.cfg.n_layers
