"""The page of columns says what the classes of results declare."""

from __future__ import annotations

import columns_page
import pytest

pytestmark = pytest.mark.skipif(not columns_page.PAGE.is_file(), reason="needs a source tree")


def test_the_page_is_what_its_script_writes() -> None:
    written = columns_page.PAGE.read_text(encoding="utf-8")
    assert columns_page.page() == written, "the page is stale: python docs/tools/columns_page.py"
