"""Any module with a list of blocks, and Hugging Face decoders that no other adapter knows."""

from __future__ import annotations

from typing import Any

from torch import nn

from probelens.adapter import Adapter, ModelConfig
from probelens.adapters._hf import HFAdapter, first_child, is_hf, join
from probelens.errors import InputError, nearest
from probelens.hooks import HookPoint

__all__ = ["Generic"]

_MIXERS = (
    "mixer", "mamba", "self_attn", "attention", "attn", "temporal_block", "recurrent_block", "time_mixing",
    "linear_attn", "rnn", "lstm", "gru",
)  # fmt: skip
_MLPS = ("mlp", "feed_forward", "mlp_block", "channel_mixing", "ffn")


def _parts_of_block(adapter: Adapter, layer: int, path: str) -> list[HookPoint]:
    block = adapter.module.get_submodule(path)
    prefix = f"blocks.{layer}."
    points = []
    mixer, mlp = first_child(block, _MIXERS), first_child(block, _MLPS)
    if mixer is not None:
        points.append(
            adapter.boundary(
                prefix + "mixer.hook_out", join(path, mixer), "out", aliases=(prefix + "hook_mixer_out",),
                note=f"output of {type(block.get_submodule(mixer)).__name__}",
            )
        )  # fmt: skip
    if mlp is not None:
        points.append(adapter.boundary(prefix + "hook_mlp_out", join(path, mlp), "out"))
    return points


class GenericHF(HFAdapter):
    """A Hugging Face decoder of mixed or unknown blocks: residual, mixer and MLP outputs."""

    name = "generic"

    def block_points(self, layer: int, path: str) -> list[HookPoint]:
        return _parts_of_block(self, layer, path)


class Generic(Adapter):
    """Any ``nn.Module``: say where its blocks are.

    Args:
        module: The model. Its first argument is the input, its first output tensor the logits.
        blocks: Path of the ``ModuleList`` (or ``Sequential``) of blocks, or a list of paths.
        embed: Path of the token embedding, if there is one.
        ln_final: Path of the norm after the last block, if there is one.
        unembed: Path of the output layer, if there is one.
        tokenizer: For text inputs.

    Raises:
        InputError: A path that the module doesn't have.
    """

    name = "generic"
    priority = 0
    options = ("blocks", "embed", "ln_final", "unembed", "tokenizer")

    def __init__(
        self,
        module: nn.Module,
        blocks: str | list[str] | None = None,
        embed: str | None = None,
        ln_final: str | None = None,
        unembed: str | None = None,
        tokenizer: Any = None,
    ) -> None:
        super().__init__(module)
        self.tokenizer = tokenizer
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
    def wrap(cls, module: Any, **options: Any) -> Any:
        from probelens.model import HookedModel

        if options.get("blocks") is None and cls.matches(module):
            return HookedModel(module, GenericHF(module, **options))
        return HookedModel(module, cls(module, **options))

    def block_points(self, layer: int, path: str) -> list[HookPoint]:
        return _parts_of_block(self, layer, path)


def _lists(module: nn.Module) -> list[str]:
    return [p for p, m in module.named_modules() if isinstance(m, (nn.ModuleList, nn.Sequential)) and p][:5]
