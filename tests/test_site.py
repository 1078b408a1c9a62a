"""The documentation site is built without warnings, and its pages fetch nothing from elsewhere."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT

pytest.importorskip("mkdocs")
# What a browser fetches by itself, as opposed to links that a reader clicks.
FETCHED = re.compile(r"""<(?:script|img|iframe|source|link)\b[^>]*\b(?:src|href)=["']?(https?://[^"'\s>]+)""")


@pytest.mark.slow
def test_the_site_is_built_without_warnings_and_fetches_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    # Without the notice of the theme about its successor.
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, ended.stderr
    assert "WARNING" not in ended.stderr
    pages = sorted((tmp_path / "site").rglob("*.html"))
    assert {"index.html", "ops.html", "changelog.html", "own_data.html"} <= {page.name for page in pages}
    fetched = {address for page in pages for address in FETCHED.findall(page.read_text())}
    assert fetched == set()
    for page in pages:
        assert "fonts.googleapis" not in page.read_text()


def test_all_pages_are_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert {page for page in pages if f" {page}\n" not in text} == set()
