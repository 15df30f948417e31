"""Whether the Hugging Face hub can be reached, found out before anything waits for it."""

from __future__ import annotations

import os
import time
from typing import Any

# Looked for by name: huggingface_hub has changed the HTTP library that raises them.
_NO_CONNECTION = {"ConnectError", "ConnectTimeout"}
_WAIT = 1.0


def unreachable(name: str, options: dict[str, Any]) -> str | None:
    """Why a model of the hub can only come from the local cache; None if the hub answers or isn't asked at all.

    huggingface_hub tries every file of a model six times, for half a minute, before it says that there is no
    connection. Here two attempts to connect are made, each as long as huggingface_hub waits for one
    (``HF_HUB_ETAG_TIMEOUT``); a slow hub is not treated as unreachable.
    """
    from huggingface_hub import constants, get_session

    if os.path.isdir(name) or options.get("local_files_only") or constants.HF_HUB_OFFLINE:
        return None
    # To connect, to read, to write, and to get a connection of the pool: whoever lets us connect is there.
    patience = float(constants.HF_HUB_ETAG_TIMEOUT)
    why = None
    for attempt in range(2):
        if attempt:
            time.sleep(_WAIT)
        try:
            get_session().head(constants.ENDPOINT, timeout=(patience, _WAIT, _WAIT, patience))
        except Exception as err:
            if not _NO_CONNECTION & {cls.__name__ for cls in type(err).__mro__}:
                return None
            why = f"{constants.ENDPOINT} can't be reached: {err or type(err).__name__}"
            if "Timeout" in type(err).__name__:
                break
        else:
            return None
    return why
