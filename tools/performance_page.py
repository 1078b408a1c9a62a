"""Rewrite the tables and figures of docs/performance.md, and a table of README.md, from docs/performance/*.json.

python tools/performance_page.py

The tables of docs/performance/NAME.json go between <!-- NAME --> and <!-- /NAME -->. Between <!-- goals -->,
<!-- plain --> and <!-- machine --> and their ends are tables that are made from several records or from a part of one.
Between <!-- speed --> and <!-- /speed --> of README.md is a table of speed-ups. The rest of both pages is kept.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from performance_goals import goals_table, readme_table

from inlinevit.benchmark.plots import make_figure
from inlinevit.benchmark.report import make_markdown
from inlinevit.benchmark.results import Results, read_results
from inlinevit.benchmark.tables import best_table, machine_table
from inlinevit.report import markdown_table, replace_between, svg_bytes

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "performance.md"
README = ROOT / "README.md"
NOT_RECORDED = "Not recorded yet.\n"


def main() -> None:
    """Rewrite the page and its figures."""
    records = record_paths(PAGE)
    PAGE.write_text(rewritten(PAGE.read_text(), records))
    README.write_text(rewritten_readme(README.read_text(), records))
    for path in records:
        path.with_suffix(".svg").write_bytes(svg_bytes(make_figure(read_results(path)[0])[0]))
    print(f"{PAGE} has the tables of {len(records)} records")


def record_paths(page: Path) -> list[Path]:
    """Return the records of a page."""
    return sorted((page.parent / page.stem).glob("*.json"))


def rewritten(page: str, paths: list[Path]) -> str:
    """Return a page with the tables of these records."""
    records = {path.stem: read_results(path) for path in paths}
    results = {name: found for name, (found, _) in records.items()}
    for path in paths:
        picture = f"{path.parent.name}/{path.stem}.svg"
        page = replace_between(page, path.stem, make_markdown(results[path.stem], picture))
    page = replace_between(page, "goals", f"{markdown_table(goals_table(results))}\n")
    page = replace_between(page, "plain", plain_section(results))
    machines = f"{markdown_table(machine_table(records))}\n" if records else NOT_RECORDED
    return replace_between(page, "machine", machines)


def rewritten_readme(readme: str, paths: list[Path]) -> str:
    """Return the README with the speed-ups of these records."""
    results = {path.stem: read_results(path)[0] for path in paths}
    return replace_between(readme, "speed", f"{markdown_table(readme_table(results))}\n")


def plain_section(records: Mapping[str, Results]) -> str:
    """Return the table of plain calls, from the record of resolutions."""
    if "resolution" not in records:
        return NOT_RECORDED
    results = records["resolution"]
    eager = [one for one in results.measurements if one.mode == "eager"]
    return f"{markdown_table(best_table(replace(results, measurements=eager)))}\n"


if __name__ == "__main__":
    main()
