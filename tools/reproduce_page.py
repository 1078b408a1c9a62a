"""Rewrite the tables of docs/results.md from docs/reproduce/results.json: python tools/reproduce_page.py [RECORD].

If RECORD is given, the OUTPUT/results.json of `inlinevit reproduce`, it becomes the new record. Tables go between
<!-- reproduce --> and <!-- /reproduce -->, and between the marks <!-- reproduce-NAME --> of each study. The rest of the
page is kept.
"""

import argparse
from pathlib import Path

from inlinevit.experiments.reproduce.record import read_record
from inlinevit.experiments.reproduce.tables import rewritten

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE, RECORD = DOCS / "results.md", DOCS / "reproduce" / "results.json"


def main() -> None:
    """Copy the new record, if one is given, and rewrite the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", nargs="?", type=Path, metavar="RECORD", help="such as runs/reproduce/results.json")
    record = read_record(parser.parse_args().record or RECORD)
    page = rewritten(PAGE.read_text(), record)
    record.write(RECORD)
    PAGE.write_text(page)
    print(f"{PAGE} has the tables of {RECORD}")


if __name__ == "__main__":
    main()
