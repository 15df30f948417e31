"""Models of the hub: without a connection only the cache is asked, and nothing waits for retries."""

from __future__ import annotations

import http.server
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest
import zoo

import probelens as pl
from probelens.adapters.hf.hub import unreachable


def closed_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture
def server() -> Iterator[str]:
    """A hub that answers 503 to everything."""

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(503)
            self.end_headers()

        def log_message(self, *args: object) -> None: ...

    made = http.server.HTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{made.server_port}"
    made.shutdown()
    made.server_close()


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("probelens.adapters.hf.hub._WAIT", 0.01)
    return monkeypatch


def test_only_a_hub_that_lets_nobody_connect_is_unreachable(
    online: pytest.MonkeyPatch, server: str, tmp_path: Path
) -> None:
    closed = closed_port()
    online.setattr(huggingface_hub.constants, "ENDPOINT", closed)
    why = unreachable("someone/model", {})
    assert why is not None
    assert why.startswith(f"{closed} can't be reached: ")
    assert unreachable(str(tmp_path), {}) is None, "a folder needs no hub"
    assert unreachable("someone/model", {"local_files_only": True}) is None
    online.setattr(huggingface_hub.constants, "ENDPOINT", server)
    assert unreachable("someone/model", {}) is None, "it answers, if only 503"


def test_a_hub_that_is_silent_after_the_connection_is_slow_and_not_unreachable(online: pytest.MonkeyPatch) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        online.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert unreachable("someone/model", {}) is None


def test_offline_mode_is_asked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub, "get_session", lambda: pytest.fail("the hub was asked"))
    assert unreachable("someone/model", {}) is None
    with pytest.raises(pl.InputError, match="can't load 'someone/no-such-model' as a causal language model"):
        pl.load("someone/no-such-model")


CODE = """
import probelens as pl
model = pl.load("someone/cached")
print(model.cfg.n_layers, model.cfg.model_name)
try:
    pl.load("someone/not-cached")
except pl.InputError as err:
    print(err)
"""


def test_without_a_connection_a_cached_model_loads_and_another_is_refused_at_once(tmp_path: Path) -> None:
    place = tmp_path / "hub" / "models--someone--cached"
    commit = "0" * 40
    zoo.build("neox").save_pretrained(place / "snapshots" / commit)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(commit)
    endpoint = closed_port()
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "TRANSFORMERS_"))}
    env |= {"HF_HOME": str(tmp_path), "HF_ENDPOINT": endpoint}
    done = subprocess.run([sys.executable, "-c", CODE], env=env, capture_output=True, text=True, check=True)
    first, said = done.stdout.split("\n", 1)
    assert first == "3 someone/cached"
    for text in (
        "'someone/not-cached'",
        f"{endpoint} can't be reached",
        "it isn't in the local cache",
        "save_pretrained",
        "HF_HUB_OFFLINE",
    ):
        assert text in said
    assert "Retrying" not in done.stderr, "huggingface_hub's half minute for each file"
