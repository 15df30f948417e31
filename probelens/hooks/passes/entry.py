"""Entry: one hook function in place at one point, how it is called, and for whose runs."""

from __future__ import annotations

import contextlib
import traceback
from dataclasses import dataclass

import torch
from torch import Tensor

from probelens.errors import InputError, noted
from probelens.hooks.passes.scope import Scope
from probelens.hooks.points import Direction, HookFn, HookPoint, checked

__all__ = ["Entry"]


@dataclass(eq=False, slots=True)
class Entry:
    """One hook function at one point, with the number of its calls."""

    point: HookPoint
    fn: HookFn
    dir: Direction = "fwd"
    permanent: bool = False
    # A reader returns nothing, so it can get a whole state trajectory in one piece.
    reads: bool = False
    # Called in place of ``fn`` with a tensor that the model doesn't use again.
    keep: HookFn | None = None
    # The block whose calls it reaches; None for every thread.
    scope: Scope | None = None
    fired: int = 0
    attached: int = 0
    active: bool = True

    def here(self) -> bool:
        return self.scope is None or self.scope.here()

    def forward(self, tensor: Tensor, hook: HookPoint, last_use: bool = False) -> Tensor:
        if self.dir == "bwd":
            return self._listen_to_gradient(tensor, hook)
        self.fired += 1
        fn = self.fn if self.keep is None or not last_use else self.keep
        if tensor.requires_grad and torch.is_grad_enabled() and not (self.reads or getattr(fn, "pure", False)):
            # A hook may write into what it gets; autograd refuses that for a view that a split gave, and for a tensor
            # that the backward pass needs.
            tensor = tensor.clone()
        try:
            with _named(hook):
                new = fn(tensor, hook=hook)
        except RecursionError as err:
            frames = [frame for frame, _ in traceback.walk_tb(err.__traceback__)]
            if sum(frame.f_code is Entry.forward.__code__ for frame in frames) < 2:
                raise
            raise InputError(
                f"the hook at {hook.name!r} runs its own model, and that run calls the hook again, without end. Run the model "
                "before, and let the hook use the result, or run another wrapped model: pl.wrap(copy.deepcopy(model.module))"
            ) from None
        return tensor if new is None else checked(new, tensor, hook)

    def _listen_to_gradient(self, tensor: Tensor, hook: HookPoint) -> Tensor:
        if not tensor.requires_grad:
            raise InputError(
                f"backward hook asked for at {hook.name!r}, but no gradient is computed there: "
                f"grad is {'on' if torch.is_grad_enabled() else 'off (torch.no_grad or inference_mode)'} "
                "and the tensor doesn't require one. Turn gradients on for the parameters or the input."
            )
        # A tensor of its own makes the gradient the one of this point, not of the tensor's other uses. In a view the hook
        # would be lost where the model adds to it in place, as Falcon does.
        tensor = tensor.clone()
        self.attached += 1

        def on_gradient(grad: Tensor) -> Tensor | None:
            if not self.active:
                return None
            self.fired += 1
            with _named(hook):
                new = self.fn(grad, hook=hook)
            # PyTorch's own backward hooks, and so TransformerLens', return a tuple.
            new = new[0] if isinstance(new, tuple) and len(new) == 1 else new
            return None if new is None else checked(new, grad, hook)

        tensor.register_hook(on_gradient)
        return tensor


def _named(hook: HookPoint) -> contextlib.AbstractContextManager[None]:
    """Say in the traceback of whatever a hook function raises which point it was called at, and how."""
    return noted(lambda: f"Raised by the hook at {hook.name!r}, which was called as fn(tensor, hook=point).")
