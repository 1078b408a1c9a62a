"""What the documentation site adds to docs/: pages of the root folder, notebooks, and links out of docs/."""

import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
SOURCE = "https://github.com/inlinevit/inlinevit"
# Documents of the root folder, by their page.
PAGES = {
    "changelog.md": "CHANGELOG.md",
    "code_of_conduct.md": "CODE_OF_CONDUCT.md",
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
}
LINK = re.compile(r"(?<=\]\()(?!https?://|#|mailto:)([^)#\s]+)(#[^)\s]*)?(?=\))")
# A link whose text is the name of a document, which readers of the site do not see.
NAMED = re.compile(r"\[(?:docs/)?[\w/]+\.md\](?=\(([^)#\s]+\.md))")
# A document that a docstring names.
MENTIONED = re.compile(r"\bdocs/([\w/]+)\.md\b")
# Code in a cell of a table that is too long for one line.
LONG_CODE = re.compile(r"<code>([^<\s]{20,})</code>")
# Longer output of a cell is cut.
MOST_LINES = 30


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/."""
    for page, name in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text()))
    for notebook in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        page = f"notebooks/{notebook.stem}.md"
        files.append(File.generated(config, page, content=notebook_page(notebook)))
    return files


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links between documents of the repository to pages, or to the repository for what is not a page."""
    name = page.file.src_uri
    here = "" if name in PAGES else posixpath.dirname(f"docs/{name}")
    by_document = {document: one for one, document in PAGES.items()}

    def rewrite(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(here, match[1]))
        anchor = match[2] or ""
        if target in by_document:
            inside = by_document[target]
        elif target.startswith("docs/"):
            inside = target.removeprefix("docs/")
        elif (ROOT / target).exists():
            return f"{SOURCE}/{'tree' if (ROOT / target).is_dir() else 'blob'}/main/{target}{anchor}"
        else:
            return match[0]
        return posixpath.relpath(inside, posixpath.dirname(name) or ".") + anchor

    def name_by_title(match: re.Match[str]) -> str:
        title = title_of(ROOT / posixpath.normpath(posixpath.join(here, match[1])))
        return f"[{title}]" if title else match[0]

    return LINK.sub(rewrite, NAMED.sub(name_by_title, markdown))


def on_page_content(html: str, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Let long paths in tables break at separators; link pages that docstrings name as documents of the repository."""
    name = page.file.src_uri
    html = re.sub(r"<td>.*?</td>", lambda cell: LONG_CODE.sub(break_at_separators, cell[0]), html)
    if not name.startswith("reference/"):
        return html

    def link(match: re.Match[str]) -> str:
        target = files.get_file_from_path(f"{match[1]}.md")
        if target is None:
            raise ValueError(f"{name} shows a docstring that names {match[0]}, which is not a page: correct it")
        title = title_of(ROOT / match[0]) or match[1]
        return f'<a href="{target.url_relative_to(page.file)}">{title}</a>'

    return MENTIONED.sub(link, html)


def break_at_separators(code: re.Match[str]) -> str:
    """Return code that may be broken after slashes, colons and underscores."""
    breakable = re.sub(r"(/|::|_)", r"\1<wbr>", code[1])
    return f'<code class="path">{breakable}</code>'


def title_of(document: Path) -> str:
    """Return the first heading of a document; "" if there is none."""
    lines = document.read_text().splitlines() if document.is_file() else []
    return next((line.removeprefix("# ") for line in lines if line.startswith("# ")), "")


def notebook_page(notebook: Path) -> str:
    """Return a notebook as Markdown: its text, its code, and its stored output."""
    cells = json.loads(notebook.read_text())["cells"]
    about = f"*[{notebook.name}]({notebook.name}) as a page: `jupyter lab docs/notebooks/{notebook.name}` runs it.*"
    parts = []
    for cell in cells:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(text)
            if len(parts) == 1:
                parts.append(about)
            continue
        parts.append(f"```python\n{text}\n```")
        printed = "".join(output_text(output) for output in cell["outputs"]).rstrip()
        if printed:
            lines = printed.splitlines()
            shown = lines[:MOST_LINES] + (["…"] if len(lines) > MOST_LINES else [])
            parts.append("```text\n" + "\n".join(shown) + "\n```")
        parts += [picture for output in cell["outputs"] if (picture := output_picture(output))]
    return "\n\n".join(parts) + "\n"


def output_text(output: dict[str, Any]) -> str:
    """Return what a cell has printed on standard output, or its value."""
    if output["output_type"] == "stream" and output["name"] == "stdout":
        return "".join(output["text"])
    data = output.get("data", {})
    return "" if "image/png" in data else "".join(data.get("text/plain", "")) + "\n" * ("text/plain" in data)


def output_picture(output: dict[str, Any]) -> str:
    """Return a picture that a cell shows, as part of the page."""
    picture = output.get("data", {}).get("image/png")
    return "" if picture is None else f'<img alt="output" src="data:image/png;base64,{"".join(picture).strip()}">'
