"""Models built on ``nn.LSTM``, ``nn.GRU`` or ``nn.RNN``: every layer of every stack is a block.

Also the layers inside one fused, stacked module, of which plain PyTorch hooks see only the last.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from probelens.adapters.hf.decoder import is_hf
from probelens.errors import InputError
from probelens.hooks.adapter import Adapter
from probelens.hooks.config import Call, ModelConfig, StopForward
from probelens.hooks.forwards import (
    called_with,
    device_of,
    forward_now,
    refuse_replaced_forward,
    submodule,
    swapped_forward,
    this_thread,
)
from probelens.hooks.points import NOTES, RESID, HookPoint
from probelens.hooks.switchboard import Tap
from probelens.hooks.wrapping import own_layers, unadapted
from probelens.kernels.rnn import rnn_forward, rnn_points
from probelens.kernels.tap import NullTap

if TYPE_CHECKING:
    from probelens.hooks.model import HookedModel
    from probelens.running.sweep.resumer import Resumer

__all__ = ["TorchRNN"]

_NOTES = {
    "hook_resid_pre": "input of the layer; an edit reaches this layer and all after it",
    "hook_resid_post": "output of the layer at every step, directions side by side; an edit reaches the layers "
    "after it, not the layer's own next step",
}


class TorchRNN(Adapter):
    """Any module that contains ``nn.LSTM``, ``nn.GRU`` or ``nn.RNN`` layers, or is one.

    Blocks are the recurrent layers in the order in which the modules were registered, which must be the order in which
    they run. ``embed`` is found if there is exactly one ``nn.Embedding``, ``unembed`` if exactly one ``nn.Linear``
    follows.
    """

    name = "torch-rnn"
    priority = 20
    options = ("embed", "ln_final", "unembed", "tokenizer")

    def __init__(
        self, module: nn.Module, embed: str | None = None, ln_final: str | None = None,
        unembed: str | None = None, tokenizer: Any = None,
    ) -> None:  # fmt: skip
        super().__init__(module)
        self.tokenizer = tokenizer
        # A module that holds recurrent layers may step them in a loop of its own.
        self.layout = "known" if isinstance(module, nn.RNNBase) else "calls"
        # Each block: the path of its module and which of that module's layers it is.
        self.layers: list[tuple[str, int]] = []
        layers = own_layers(module)
        found = [(path, m) for path, m in layers if isinstance(m, nn.RNNBase)]
        for path, rnn in found:
            self.layers += [(path, j) for j in range(rnn.num_layers)]
        self.blocks = [path for path, _ in self.layers]
        last = found[-1][1]
        after = [path for path, _ in layers].index(found[-1][0])
        linears = [path for path, m in layers[after + 1 :] if isinstance(m, nn.Linear)]
        embeddings = [path for path, m in layers if isinstance(m, nn.Embedding)]
        embed = embed or (embeddings[0] if len(embeddings) == 1 else None)
        unembed = unembed or (linears[0] if len(linears) == 1 else None)
        parts = {"embed": embed, "ln_final": ln_final, "unembed": unembed}
        self.parts = {part: path for part, path in parts.items() if path is not None}
        names = [path for path, _ in module.named_modules()]
        for part, path in self.parts.items():
            if path not in names:
                raise InputError(f"{part}={path!r}: {type(module).__name__} has no such submodule. Found: {names[1:6]}")
        table, head = (
            unadapted(module.get_submodule(self.parts[part])) if part in self.parts else None
            for part in ("embed", "unembed")
        )
        self.cfg = ModelConfig(
            n_layers=len(self.layers),
            d_model=_width(last),
            d_vocab=int(getattr(table, "num_embeddings", 0) or 0),
            d_vocab_out=int(getattr(head, "out_features", 0) or 0),
            model_name=type(module).__name__,
            architecture=self.name,
            extra={"cell": last.mode.lower(), "bidirectional": last.bidirectional, "hidden_size": last.hidden_size},
        )

    @classmethod
    def matches(cls, module: Any) -> bool:
        return (
            isinstance(module, nn.Module)
            and not is_hf(module)
            and any(isinstance(m, nn.RNNBase) for m in module.modules())
        )

    def _rnn(self, path: str) -> nn.RNNBase:
        return submodule(self.module, path)  # type: ignore[return-value]

    def points(self) -> list[HookPoint]:
        out: list[HookPoint] = []
        if "embed" in self.parts:
            out.append(self.boundary("hook_embed", self.parts["embed"], "out", note=NOTES["embed"]))
        for layer, (path, _) in enumerate(self.layers):
            out.extend(self.block_points(layer, path))
        return out + self.readout_points()

    def block_points(self, layer: int, path: str) -> list[HookPoint]:
        rnn, prefix = self._rnn(path), f"blocks.{layer}."
        points = []
        for name, side, alias in (("hook_resid_pre", "in", "rnn.hook_in"), ("hook_resid_post", "out", "rnn.hook_out")):
            options: dict[str, Any] = {"aliases": (prefix + alias,), "note": _NOTES[name]}
            if rnn.num_layers == 1:
                points.append(self.boundary(prefix + name, path, side, batch_first=rnn.batch_first, **options))
            else:
                points.append(self.interior(prefix + name, path, axes=RESID, **options))
        before, after = points
        return [before, *self._inner(prefix, path, self.layers[layer][1]), after]

    def _inner(self, prefix: str, path: str, j: int) -> list[HookPoint]:
        points = []
        for name, point in rnn_points(self._rnn(path)).items():
            owner, _, tail = name.partition(".")
            if owner == str(j) and tail not in ("hook_in", "hook_out"):
                full = f"{prefix}rnn.{tail}"
                reach = "; an edit reaches this step's state and every later one" if "_gate_" in tail else ""
                points.append(self.interior(full, path, axes=point.axes, step=point.step, note=point.note + reach))
        return points

    def tap_names(self, path: str) -> dict[str, str]:
        names: dict[str, str] = {}
        for layer, (owner, j) in enumerate(self.layers):
            if owner != path:
                continue
            prefix = f"blocks.{layer}."
            for point in self.all_points:
                if point.kind == "interior" and point.name.startswith(prefix):
                    names[f"{j}.{point.name.rsplit('.', 1)[1]}"] = point.name
            names[f"{j}.hook_in"] = names.pop(f"{j}.hook_resid_pre", "")
            names[f"{j}.hook_out"] = names.pop(f"{j}.hook_resid_post", "")
        return names

    def instrumented_paths(self) -> list[str]:
        return list(dict.fromkeys(self.blocks))

    def instrument(self, path: str, tap: Tap) -> contextlib.AbstractContextManager[None]:
        rnn = self._rnn(path)
        refuse_replaced_forward(rnn, ("torch",))

        def forward(input: Any, hx: Any = None) -> Any:
            return rnn_forward(rnn, input, hx, tap)

        # What starts or stops inside the stack takes the place of this forward and keeps its tap.
        forward.tap = tap  # type: ignore[attr-defined]
        return swapped_forward(rnn, forward, here=tap.here)

    def resumer(self, model: HookedModel) -> Resumer | None:
        from probelens.adapters.torch_rnn_resume import RecurrentLayers

        return RecurrentLayers.of(model)

    def absent(self, name: str) -> str | None:
        if ".attn." in name or ".mlp." in name or name.endswith(("attn_out", "mlp_out", "resid_mid", "mixer_out")):
            return "a recurrent layer has no attention, MLP or mixer; use hook_resid_post, rnn.hook_h or its gates"
        if ".hook_c" in name or ".hook_gate" in name:
            return f"this layer is a {self.cfg.extra['cell'].upper()}"
        return None

    def resid_call(self, resid: Tensor, mask: Tensor | None, extra: dict[str, Any]) -> Call:
        if "embed" in self.parts:
            return super().resid_call(resid, mask, extra)
        # A model without an embedding takes features: only their shape matters, the values are skipped.
        first = self._rnn(self.blocks[0])
        shape = resid.shape[:2] if first.batch_first else (resid.shape[1], resid.shape[0])
        return Call((resid.new_zeros(*shape, first.input_size),), extra, None, mask)

    # -- starting and stopping at a layer, also inside a fused stack ------------------------------------

    @contextlib.contextmanager
    def stopping_at(self, layer: int) -> Iterator[None]:
        if layer >= len(self.layers):
            with super().stopping_at(layer):
                yield
            return
        path, j = self.layers[layer]
        rnn, here = self._rnn(path), this_thread()
        if j == 0:

            def stop_before(module: nn.Module, args: tuple[Any, ...]) -> None:
                if here():
                    raise StopForward(_position_first(rnn, args[0]))

            with rnn.register_forward_pre_hook(stop_before, prepend=True):
                yield
            return
        now = forward_now(rnn)
        tap, run_layer = _StopAt(f"{j}.hook_in", getattr(now, "tap", None)), getattr(now, "run_layer", None)

        def forward(input: Any, hx: Any = None) -> Any:
            return rnn_forward(rnn, input, hx, tap, run_layer=run_layer)

        # What starts inside the stack stops there, too.
        forward.tap, forward.run_layer = tap, run_layer  # type: ignore[attr-defined]
        with swapped_forward(rnn, forward, here=here):
            yield

    @contextlib.contextmanager
    def starting_at(self, layer: int, resid: Tensor) -> Iterator[None]:
        here = this_thread()
        last, paths = layer >= len(self.layers), self.instrumented_paths()
        path, j = (self.after_blocks(), 0) if last else self.layers[layer]
        rnn = self._rnn(path)
        resid = resid.to(device_of(rnn) or resid.device)

        def feed(module: nn.Module, args: tuple[Any, ...]) -> Any:
            return (_like(rnn, args[0], resid), *args[1:]) if here() else None

        with contextlib.ExitStack() as stack:
            stack.enter_context(self._skipped(paths if last else paths[: paths.index(path)]))
            if last:
                stack.enter_context(called_with(rnn, resid))
            elif j == 0:
                stack.enter_context(rnn.register_forward_pre_hook(feed, prepend=True))
            else:
                now = forward_now(rnn)
                tap, run_layer = getattr(now, "tap", None), getattr(now, "run_layer", None)

                def forward(input: Any, hx: Any = None) -> Any:
                    return rnn_forward(rnn, input, hx, tap, start=(j, resid), run_layer=run_layer)

                stack.enter_context(swapped_forward(rnn, forward, here=here))
            yield

    @contextlib.contextmanager
    def _skipped(self, paths: list[str]) -> Iterator[None]:
        """Modules that return zeros of the right shape: what they would compute is replaced later."""
        with contextlib.ExitStack() as stack:
            for path in paths:
                rnn = self._rnn(path)
                stack.enter_context(swapped_forward(rnn, _blank(rnn), False, this_thread()))
            yield


class _StopAt:
    """The hooks' tap, if there is one, and after it the end of the forward at one point."""

    def __init__(self, name: str, tap: Tap | None) -> None:
        self.name, self.tap = name, tap or NullTap()
        self.edits, self.positions = self.tap.edits, self.tap.positions

    def __call__(self, name: str, tensor: Tensor, pos: int | None = None, length: int | None = None) -> Tensor:
        tensor = self.tap(name, tensor, pos, length)
        if name == self.name:
            raise StopForward(tensor)
        return tensor

    def wants(self, name: str) -> bool:
        return name == self.name or self.tap.wants(name)


def _position_first(rnn: nn.RNNBase, x: Tensor | PackedSequence) -> Tensor:
    if isinstance(x, PackedSequence):
        return pad_packed_sequence(x, batch_first=True)[0]
    return x if rnn.batch_first else x.transpose(0, 1)


def _like(rnn: nn.RNNBase, x: Tensor | PackedSequence, resid: Tensor) -> Tensor | PackedSequence:
    """``resid`` (batch, pos, ...) in the layout in which the module was called."""
    if isinstance(x, PackedSequence):
        _, lengths = pad_packed_sequence(x, batch_first=True)
        return pack_padded_sequence(resid, lengths, batch_first=True, enforce_sorted=False)
    return resid if rnn.batch_first else resid.transpose(0, 1)


def _width(rnn: nn.RNNBase) -> int:
    return (rnn.proj_size or rnn.hidden_size) * (2 if rnn.bidirectional else 1)


def _blank(rnn: nn.RNNBase) -> Any:
    def forward(input: Any, hx: Any = None) -> Any:
        packed = isinstance(input, PackedSequence)
        data = input.data if packed else input
        zeros = data.new_zeros(*data.shape[:-1], _width(rnn))
        zeros = input._replace(data=zeros) if packed else zeros
        batch = int(input.batch_sizes[0]) if packed else data.shape[0 if rnn.batch_first else 1]
        layers = rnn.num_layers * (2 if rnn.bidirectional else 1)
        h = data.new_zeros(layers, batch, rnn.proj_size or rnn.hidden_size)
        state = (h, data.new_zeros(layers, batch, rnn.hidden_size)) if rnn.mode == "LSTM" else h
        return zeros, state

    return forward
