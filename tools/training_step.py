"""Measure the processor time of a training step of a recipe, with several attentions in alternation.

python tools/training_step.py cifar10 --attentions inline softmax --modes eager compiled --output runs/bench

The images are random: no data are read. Compiled models come from no cache (TORCHINDUCTOR_FORCE_DISABLE_CACHES), so
that the time of their first step does not depend on earlier runs.
"""

import argparse
import os
from pathlib import Path

os.environ.setdefault("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")

from rich.console import Console

from inlinevit.benchmark.report import print_results, write_report
from inlinevit.benchmark.train_step import STEP_MODES, measure_steps


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="cifar10", help="a recipe of classification")
    parser.add_argument("--attentions", nargs="+", default=["inline", "softmax"], help="attentions of its model")
    parser.add_argument("--modes", nargs="+", choices=STEP_MODES, default=["eager"], help="how models are run")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    parser.add_argument("--rounds", type=int, default=100, help="timed steps of each")
    parser.add_argument("--output", type=Path, help="folder for JSON, report and figure")
    parser.add_argument("--name", default="step", help="name of the files in it")
    options = parser.parse_args()
    results = measure_steps(
        options.recipe,
        options.attentions,
        options.modes,
        threads=options.threads,
        rounds=options.rounds,
        console=Console(stderr=True),
    )
    print_results(results, Console())
    if options.output is not None:
        print(f"the report is {write_report(results, options.output, options.name)}")


if __name__ == "__main__":
    main()
