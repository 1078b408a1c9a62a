"""Print the results of several runs as a Markdown table: python tools/results_table.py runs/cifar10/*.

Runs whose folder names differ only after the last hyphen, in their seeds, share a row.
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path
from statistics import mean, median, stdev

from inlinevit.report import Table, markdown_table


def main() -> None:
    """Read the runs and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of finished runs, NAME-SEED")
    groups: dict[str, list[Path]] = defaultdict(list)
    for run in parser.parse_args().runs:
        groups[run.name.rpartition("-")[0] or run.name].append(run)
    rows = []
    for name, runs in groups.items():
        metrics = [json.loads((run / "results.json").read_text())["metrics"] for run in runs]
        rates = [line["images_per_second"] for run in runs for line in lines(run) if "images_per_second" in line]
        top1 = [one["top1"] for one in metrics]
        spread = f"{stdev(top1):.2f}" if len(top1) > 1 else "–"
        values = ", ".join(f"{value:.2f}" for value in top1)
        loss = mean(one["loss"] for one in metrics)
        accuracy = f"**{mean(top1):.2f}** ({values})"
        rows.append((name, str(len(runs)), accuracy, spread, f"{loss:.3f}", f"{median(rates):.0f}"))
    print(markdown_table(Table(("run", "seeds", "top-1 %", "spread", "loss", "images/s"), rows, "Results")))


def lines(run: Path) -> list[dict[str, float]]:
    """Return the lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


if __name__ == "__main__":
    main()
