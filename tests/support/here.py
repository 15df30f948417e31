"""An executor of this process, which needs no other: what ``executor=`` sends is packed, unpacked and run at once."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from typing import Any


class Here(concurrent.futures.Executor):
    """Runs everything at once in this process, through what is sent to others."""

    def __init__(self) -> None:
        self.calls = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kw: Any) -> concurrent.futures.Future[Any]:
        self.calls += 1
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        future.set_result(fn(*args, **kw))
        return future
