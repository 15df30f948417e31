"""The page of hook points says what the adapters say."""

from __future__ import annotations

import hook_points_page
import pytest
import transformers
from packaging.version import Version

pytestmark = [
    pytest.mark.skipif(not hook_points_page.PAGE.is_file(), reason="needs a source tree"),
    pytest.mark.skipif(
        Version(transformers.__version__) < Version("5.15"), reason="the page tells of the current transformers"
    ),
]


def test_the_page_is_what_its_script_writes() -> None:
    page, written = hook_points_page.page(), hook_points_page.PAGE.read_text(encoding="utf-8")
    assert page == written, "the page is stale: python docs/tools/hook_points_page.py"


def test_every_point_of_the_page_has_a_note() -> None:
    for name in ("neox", "llama", "mamba", "mamba2", "lstm", "gru", "jamba", "zamba2", "rwkv"):
        model = hook_points_page.model(name)
        assert [p.name for p in model.hook_dict.values() if not p.note] == [], name
