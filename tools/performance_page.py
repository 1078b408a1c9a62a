"""Rewrite the tables and drawings of docs/performance.md from docs/performance/*.json.

python tools/performance_page.py

What docs/performance/NAME.json holds goes between <!-- NAME --> and <!-- /NAME -->, the machine's description between
<!-- machine --> and <!-- /machine -->. The rest of the page is left as it is.
"""

from pathlib import Path

from inlinevit.benchmark.report import draw, machine_markdown, markdown, put_between, read_results, write_svg

PAGE = Path(__file__).resolve().parents[1] / "docs" / "performance.md"


def main() -> None:
    """Rewrite the page and draw the pictures."""
    records = record_paths(PAGE)
    PAGE.write_text(rewritten(PAGE.read_text(), records))
    for path in records:
        write_svg(draw(read_results(path)[0])[0], path.with_suffix(".svg"))
    print(f"{PAGE} has the tables of {len(records)} records")


def record_paths(page: Path) -> list[Path]:
    """The records of a page."""
    return sorted((page.parent / page.stem).glob("*.json"))


def rewritten(page: str, records: list[Path]) -> str:
    """The text of a page, with the tables of these records."""
    for path in records:
        picture = f"{path.parent.name}/{path.stem}.svg"
        page = put_between(page, path.stem, markdown(read_results(path)[0], picture))
    return put_between(page, "machine", machine_markdown({path.stem: read_results(path) for path in records}))


if __name__ == "__main__":
    main()
