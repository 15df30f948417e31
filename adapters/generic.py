"""Any module with a list of blocks, and Hugging Face decoders that no other adapter knows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from probelens.adapters.hf import mixers as _mixers
from probelens.adapters.hf.blocks import ATTENTION, MIXERS, MLP, BlockParts, first_child, join
from probelens.adapters.hf.decoder import HFAdapter, is_hf
from probelens.adapters.hf.stack import HFStack
from probelens.errors import InputError, nearest
from probelens.hooks.adapter import Adapter
from probelens.hooks.config import Call, ModelConfig
from probelens.hooks.forwards import submodule
from probelens.hooks.points import HookPoint
from probelens.hooks.switchboard import Tap

__all__ = ["Generic"]

_SHARED = ("shared_transformer", "shared_transf")


class GenericHF(HFStack):
    """A Hugging Face decoder of mixed or unknown blocks: Jamba, Zamba2, RWKV, RecurrentGemma and their like.

    Every block has its residual stream and the output of its mixer, whatever that is; attention, Mamba mixers and MLPs
    have the points that they have elsewhere. On attention blocks ``hook_mixer_out`` is another name of
    ``hook_attn_out``, so that "mixer_out" means every block.
    """

    name = "generic"

    def block_points(self, layer: int, path: str) -> list[HookPoint]:
        prefix, parts = f"blocks.{layer}.", self.block_parts[layer]
        points = self._shared_points(prefix, path)
        # A mixer beside attention comes first, as in Falcon-H1; else there is one of the two.
        if parts.mixer_out is not None:
            points += self._mixer_points(prefix, path, parts)
        points += super().block_points(layer, path)
        if parts.mixer is None:
            for point in points:
                if point.name == prefix + "hook_attn_out":
                    point.aliases = (prefix + "hook_mixer_out", prefix + "mixer.hook_out")
        return points

    def _mixer_points(self, prefix: str, path: str, parts: BlockParts) -> list[HookPoint]:
        where = join(path, parts.mixer_out or "")
        mixer = submodule(self.module, where)
        if _mixers.has_inside(mixer):
            return _mixers.mixer_points(self, prefix, where, parts.mixer_scale)
        alias, note = (prefix + "hook_mixer_out",), f"output of the mixer, a {type(mixer).__name__}"
        scale = parts.mixer_scale
        return [self.boundary(prefix + "mixer.hook_out", where, "out", aliases=alias, scale=scale, note=note)]

    def _shared_points(self, prefix: str, path: str) -> list[HookPoint]:
        if first_child(submodule(self.module, path), _SHARED) is None:
            return []
        note = "output of the transformer block that several layers share: added to this mixer's input only"
        return [self.boundary(prefix + "shared.hook_out", join(path, "linear"), "out", note=note)]

    def instrument_mixer(self, path: str, tap: Tap) -> contextlib.AbstractContextManager[None]:
        module = submodule(self.module, path)
        if _mixers.has_inside(module):
            return _mixers.instrumented(module, tap)
        return super().instrument_mixer(path, tap)

    def faster_paths(self) -> list[str]:
        mixers = [join(path, parts.mixer_out or "") for path, parts in zip(self.blocks, self.block_parts, strict=True)]
        return _mixers.faster_mixers(
            self, [path for path in mixers if _mixers.has_inside(submodule(self.module, path))]
        )

    # -- models whose residual stream is more than a sum --------------------------------------------------------

    def renormed(self, layer: int) -> bool:
        return isinstance(getattr(submodule(self.module, self.blocks[layer]), "pre_ln", None), nn.Module)

    def unsummed(self, layer: int) -> str | None:
        every = getattr(self.config, "rescale_every", 0)
        if not every or layer < every or self.module.training:
            return None
        return (
            f"this {type(self.module).__name__} halves its residual stream after every {every} blocks "
            f"(config.rescale_every). Decompose up to a layer under {every}, or load it with rescale_every=0"
        )

    def apply_lazy_rescaling(self) -> None:
        for module in self.module.modules():
            # RWKV's first run in eval mode divides weights by powers of two.
            rescale: Any = getattr(module, "_rescale_layers", None)
            if rescale is not None:
                rescale()

    # -- models whose blocks see more than the residual ----------------------------------------------------

    def rereads(self, layer: int) -> bool:
        # Zamba's shared transformer blocks get the embedding beside the residual.
        return any(first_child(submodule(self.module, path), _SHARED) for path in self.blocks[layer:])

    def can_skip(self) -> bool:
        return super().can_skip() and not self.rereads(0)

    @contextlib.contextmanager
    def starting_at(self, layer: int, resid: Tensor) -> Iterator[None]:
        if self.rereads(layer):
            raise InputError(
                f"start_at_layer={layer}: blocks of this {type(self.module).__name__} read the embedding again at "
                "every shared transformer block, so the residual alone isn't enough to go on from. Run it whole."
            )
        with super().starting_at(layer, resid):
            yield


class Generic(Adapter):
    """Any ``nn.Module``: say where its blocks are.

    Its first argument is the input, its first output tensor the logits. ``blocks`` is the path of the ``ModuleList``
    (or ``Sequential``) of blocks, or a list of paths; ``embed``, ``ln_final`` and ``unembed`` are paths as far as these
    exist. ``batch_first`` says whether the blocks run (batch, pos, d) or (pos, batch, d), where that can't be found out by
    running the model on a few examples.
    """

    name = "generic"
    priority = 0
    any_module = True
    options = ("blocks", "embed", "ln_final", "unembed", "tokenizer", "batch_first")
    layout = "unknown"

    def __init__(
        self,
        module: nn.Module,
        blocks: str | list[str] | None = None,
        embed: str | None = None,
        ln_final: str | None = None,
        unembed: str | None = None,
        tokenizer: Any = None,
        batch_first: bool | None = None,
    ) -> None:
        super().__init__(module)
        self.tokenizer, self.batch_first = tokenizer, batch_first
        if blocks is None:
            raise InputError(
                f"the generic adapter needs to know where the blocks of {type(module).__name__} are: "
                'pl.wrap(module, blocks="path.to.the.list"). '
                f"Lists in this module: {_lists(module) or 'none'}"
            )
        if isinstance(blocks, str):
            found = self._get(blocks, "blocks")
            self.blocks = [join(blocks, name) for name, _ in found.named_children()]
        else:
            self.blocks = [path for path in blocks if self._get(path, "blocks") is not None]
        if not self.blocks:
            raise InputError(f"blocks={blocks!r} has no submodules. Lists in this module: {_lists(module) or 'none'}")
        for part, path in (("embed", embed), ("ln_final", ln_final), ("unembed", unembed)):
            if path is not None:
                self._get(path, part)
                self.parts[part] = path
        embedding = module.get_submodule(embed) if embed is not None else None
        self.cfg = ModelConfig(
            n_layers=len(self.blocks),
            d_model=int(getattr(embedding, "embedding_dim", 0) or 0),
            d_vocab=int(getattr(embedding, "num_embeddings", 0) or 0),
            d_vocab_out=int(getattr(module.get_submodule(unembed), "out_features", 0) or 0) if unembed else 0,
            model_name=type(module).__name__,
            architecture=self.name,
        )

    def _get(self, path: str, option: str) -> nn.Module:
        try:
            return self.module.get_submodule(path)
        except AttributeError:
            paths = [p for p, _ in self.module.named_modules() if p]
            raise InputError(
                f"{option}={path!r}: {type(self.module).__name__} has no such submodule. "
                f"Nearest: {nearest(path, paths) or paths[:5]}"
            ) from None

    @classmethod
    def matches(cls, module: Any) -> bool:
        if not is_hf(module) or not hasattr(module, "get_input_embeddings"):
            return False
        inner = HFAdapter.decoder(module)
        return first_child(inner, ("layers", "h", "blocks")) is not None

    @classmethod
    def adapt(cls, module: Any, **options: Any) -> Adapter:
        if options.get("blocks") is None and cls.matches(module):
            return GenericHF(module, **options)
        return cls(module, **options)

    @contextlib.contextmanager
    def starting_at(self, layer: int, resid: Tensor) -> Iterator[None]:
        with super().starting_at(layer, resid.movedim(0, self.resid_axis)):
            yield

    def run(self, call: Call) -> Any:
        with _padded(self.module):
            return super().run(call)

    def block_points(self, layer: int, path: str) -> list[HookPoint]:
        block = submodule(self.module, path)
        prefix = f"blocks.{layer}."
        points = []
        mixer, mlp = first_child(block, (*MIXERS, *ATTENTION)), first_child(block, MLP)
        if mixer is not None:
            where, alias = join(path, mixer), (prefix + "hook_mixer_out",)
            note = f"output of {type(block.get_submodule(mixer)).__name__}"
            points.append(self.boundary(prefix + "mixer.hook_out", where, "out", aliases=alias, note=note))
        if mlp is not None:
            note = f"output of {type(block.get_submodule(mlp)).__name__}"
            points.append(self.boundary(prefix + "hook_mlp_out", join(path, mlp), "out", note=note))
        return points


@contextlib.contextmanager
def _padded(module: nn.Module) -> Iterator[None]:
    """Keep PyTorch's own encoders from packing padded sequences into nested tensors, which have no positions to hook.

    Real positions are the same; padding then holds what the layers make of it, and not zeros.
    """
    encoders = [m for m in module.modules() if isinstance(m, nn.TransformerEncoder) and m.use_nested_tensor]
    for encoder in encoders:
        encoder.use_nested_tensor = False
    try:
        yield
    finally:
        for encoder in encoders:
            encoder.use_nested_tensor = True


def _lists(module: nn.Module) -> list[str]:
    return [p for p, m in module.named_modules() if isinstance(m, (nn.ModuleList, nn.Sequential)) and p][:5]
