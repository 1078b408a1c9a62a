"""Where the time of a forward pass goes, by kind of operation, for one model of each family.

python tools/where_time_goes.py [--size 224] [--batch 1] [--threads 2] [--write]

With --write, the table goes into docs/performance.md, between <!-- profile --> and <!-- /profile -->.
"""

import argparse
from collections import Counter
from pathlib import Path

import timm
import torch
from torch.profiler import ProfilerActivity, profile

from inlinevit.report import Table, markdown_table, replace_between

PAGE = Path(__file__).resolve().parents[1] / "docs" / "performance.md"

MODELS = ("inline_deit_tiny", "inline_pvt_small", "inline_swin_tiny", "inline_cswin_tiny")
# Kinds of operations, by parts of their names; the first match counts.
KINDS = {
    "matrix products": ("addmm", "bmm", "aten::mm", "linear"),
    "softmax attention": ("scaled_dot_product", "softmax"),
    "GELU": ("gelu",),
    "convolutions": ("conv", "addcmul"),
    "norms": ("norm",),
    "copies": ("copy", "cat", "roll", "pad", "fill", "index", "contiguous"),
}
OTHERS = "others"
CALLS = 5


def time_shares(name: str, size: int, batch: int) -> dict[str, float]:
    """Return the fraction of time by kind of operation."""
    model, images = timm.create_model(name, img_size=size).eval(), torch.randn(batch, 3, size, size)
    with torch.no_grad():
        model(images)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            for _ in range(CALLS):
                model(images)
    times: Counter[str] = Counter()
    for event in profiler.key_averages():
        kind = next((kind for kind, parts in KINDS.items() if any(part in event.key for part in parts)), OTHERS)
        times[kind] += event.self_cpu_time_total
    return {kind: times[kind] / times.total() for kind in (*KINDS, OTHERS)}


def main() -> None:
    """Print the table, or write it into the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=224, help="side length of the images")
    parser.add_argument("--batch", type=int, default=1, help="images per call")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch")
    parser.add_argument("--write", action="store_true", help="write it into docs/performance.md")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    columns = {name: time_shares(name, options.size, options.batch) for name in MODELS}
    rows = [(kind, *(f"{100 * columns[name][kind]:.0f}" for name in MODELS)) for kind in (*KINDS, OTHERS)]
    table = markdown_table(Table(("time, %", *MODELS), rows, "Time by kind of operation"))
    if options.write:
        PAGE.write_text(replace_between(PAGE.read_text(), "profile", table))
    print(table)


if __name__ == "__main__":
    main()
