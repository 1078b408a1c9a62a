"""Rewrite the tables and figures of docs/performance.md from docs/performance/*.json.

python tools/performance_page.py

The tables of docs/performance/NAME.json go between <!-- NAME --> and <!-- /NAME -->, those of the machines between
<!-- machine --> and <!-- /machine -->. The rest of the page is kept.
"""

from pathlib import Path

from inlinevit.benchmark.plots import make_figure
from inlinevit.benchmark.report import make_markdown
from inlinevit.benchmark.results import read_results
from inlinevit.benchmark.tables import machine_table
from inlinevit.report import markdown_table, replace_between, svg_bytes

PAGE = Path(__file__).resolve().parents[1] / "docs" / "performance.md"


def main() -> None:
    """Rewrite the page and its figures."""
    records = record_paths(PAGE)
    PAGE.write_text(rewritten(PAGE.read_text(), records))
    for path in records:
        path.with_suffix(".svg").write_bytes(svg_bytes(make_figure(read_results(path)[0])[0]))
    print(f"{PAGE} has the tables of {len(records)} records")


def record_paths(page: Path) -> list[Path]:
    """Return the records of a page."""
    return sorted((page.parent / page.stem).glob("*.json"))


def rewritten(page: str, records: list[Path]) -> str:
    """Return a page with the tables of these records."""
    for path in records:
        picture = f"{path.parent.name}/{path.stem}.svg"
        page = replace_between(page, path.stem, make_markdown(read_results(path)[0], picture))
    machines = machine_table({path.stem: read_results(path) for path in records})
    return replace_between(page, "machine", markdown_table(machines) + "\n")


if __name__ == "__main__":
    main()
