"""The documentation site is built without warnings, and its pages fetch nothing from elsewhere."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import inlinevit
import inlinevit.analysis
from tests import ROOT

pytest.importorskip("mkdocs")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
# What a browser fetches by itself, as opposed to links that a reader clicks.
FETCHED = re.compile(r"""<(?:script|img|iframe|source|link)\b[^>]*\b(?:src|href)=["']?(https?://[^"'\s>]+)""")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    # Without the notice of the theme about its successor.
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, ended.stderr
    assert "WARNING" not in ended.stderr
    return folder


@pytest.mark.slow
def test_the_site_is_built_without_warnings_and_fetches_nothing(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert {"index.html", "ops.html", "changelog.html", "own_data.html"} <= {page.name for page in pages}
    fetched = {address for page in pages for address in FETCHED.findall(page.read_text())}
    assert fetched == set()
    for page in pages:
        assert "fonts.googleapis" not in page.read_text()


@pytest.mark.slow
def test_docstrings_of_the_reference_link_to_pages(site: Path) -> None:
    page = (site / "reference" / "inlinevit.html").read_text()
    assert '<a href="../images.html">' in page
    assert "docs/images.md" not in page


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium: apt-get install chromium")
def test_search_works_in_a_page_that_is_opened_as_a_file(site: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as started:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = started.chromium.launch(executable_path=CHROMIUM, args=arguments)
        page = browser.new_page()
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto((site / "index.html").as_uri())
        page.get_by_role("textbox", name="Search").press_sequentially("replace_attention")
        page.locator(".md-search-result__item a", has_text="inlinevit.replace_attention").first.wait_for()
        browser.close()
    assert errors == []


def test_all_pages_are_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert {page for page in pages if f" {page}\n" not in text} == set()


@pytest.mark.parametrize(
    ("module", "page", "elsewhere"),
    [
        # Packages have pages of their own, and so has the layer.
        (inlinevit, "inlinevit", {"InLineAttention", "__version__", "layers", "models", "ops", "testing"}),
        (inlinevit.analysis, "analysis", set()),
        # A table whose content is what list_attentions and find_attention return; the latter two are of inlinevit.
        (inlinevit.layers, "layers", {"ATTENTIONS", "list_attentions", "register_attention"}),
        (
            inlinevit.models,
            "models",
            {"PretrainedWeightsError", "baseline_deit", "load_checkpoint", "replace_attention"},
        ),
        (inlinevit.ops, "ops", set()),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_all_public_names_are_in_the_reference(module: ModuleType, page: str, elsewhere: set[str]) -> None:
    text = (ROOT / "docs" / "reference" / f"{page}.md").read_text()
    shown = {path.rpartition(".")[2] for path in re.findall(r"^::: (\S+)$", text, re.MULTILINE)}
    assert set(module.__all__) - shown == elsewhere
