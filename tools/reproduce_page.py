"""Rewrite tables and figures of studies.md and choosing_attention.md in docs/: python tools/reproduce_page.py [RECORD].

docs/reproduce/results.json is the record of `inlinevit reproduce`. If RECORD is given, the OUTPUT/results.json of that
command, it becomes the new record; before there is one, all tables are empty. docs/reproduce/results-1000-steps.json is
that of the former, shorter runs, docs/reproduce/residual.json that of tools/residual_branch.py, and
docs/performance/attentions.json that of `inlinevit bench attentions`. Tables go between marks such as
<!-- reproduce --> and <!-- /reproduce -->. The rest of the pages is kept.
"""

import argparse
import json
from pathlib import Path

from inlinevit.benchmark.results import read_results
from inlinevit.experiments.reproduce.document import Records, figure_path, generated_parts, make_figures, rewritten
from inlinevit.experiments.reproduce.record import completed, empty_record, read_record
from inlinevit.report import svg_bytes

DOCS = Path(__file__).resolve().parents[1] / "docs"


def read_records(docs: Path) -> Records:
    """Return the records in docs/ that there are."""
    own, times = docs / "reproduce" / "results.json", docs / "performance" / "attentions.json"
    residual = docs / "reproduce" / "residual.json"
    return Records(
        completed(read_record(own)) if own.exists() else empty_record(),
        read_record(docs / "reproduce" / "results-1000-steps.json"),
        read_results(times)[0] if times.exists() else None,
        json.loads(residual.read_text()) if residual.exists() else None,
    )


def main() -> None:
    """Copy the new record, if one is given, and rewrite the pages and their figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", nargs="?", type=Path, metavar="RECORD", help="such as runs/reproduce/results.json")
    given = parser.parse_args().record
    if given is not None:
        read_record(given).write(DOCS / "reproduce" / "results.json")
    records = read_records(DOCS)
    parts = generated_parts(records)
    for name in parts:
        page = DOCS / name
        page.write_text(rewritten(page.read_text(), parts[name]))
    for name, figure in make_figures(records.studies, records.times).items():
        figure_path(DOCS, name).write_bytes(svg_bytes(figure))
    print(f"{' and '.join(parts)} in {DOCS} have the tables of {DOCS / 'reproduce'}")


if __name__ == "__main__":
    main()
