"""Measure time and memory of streamed images, and rewrite the table of docs/huge_images.md.

    python tools/record_streaming.py                # measure what docs/huge_images/record.json lacks, then the table
    python tools/record_streaming.py deit-16384     # some measurements again
    python tools/record_streaming.py --table        # the table and the curves only

Each measurement is one call in a process of its own, on two threads. The pixels are synthetic and computed by rows, so
that no image is in memory and no disk is measured. Softmax attention is timm's DeiT-T, called as it is: its memory is
linear as well, since torch computes attention in blocks, and its time is not.
"""

import argparse
import json
import math
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import timm
import torch
from torch import Tensor

import inlinevit
from inlinevit.report import STYLES, Line, Panel, Table, lines_figure, markdown_table, replace_between, svg_bytes

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "docs" / "huge_images" / "record.json"
PAGE = ROOT / "docs" / "huge_images.md"
CURVES = RECORD.with_name("curves.svg")
SOFTMAX = "deit_tiny_patch16_224"
PATCH = 16


@dataclass(frozen=True)
class Case:
    """A measurement.

    Attributes:
        model: A model of inlinevit, which is streamed, or of timm, which is called.
        side: Side of the image in pixels.
        memory: Budget of streaming.
        spill: Whether tokens may be in files.
        dtype: Of optimize_for_inference; None = the model as it was created.
    """

    model: str
    side: int
    memory: str = "2GB"
    spill: bool = False
    dtype: str | None = None

    @property
    def is_softmax(self) -> bool:
        """Whether it is the softmax baseline."""
        return self.model == SOFTMAX


DEIT = "inline_deit_tiny"
CASES = {
    "deit-16384": Case(DEIT, 16384),
    "deit-16384-spilled": Case(DEIT, 16384, "800MB", spill=True),
    "deit-16384-int8": Case(DEIT, 16384, dtype="int8"),
    "pvt-8192": Case("inline_pvt_tiny", 8192, "1.4GB"),
    # The map of the first stage has 1.07 GB, and a process with torch and timm 0.9 GB before the call.
    "pvt-8192-spilled": Case("inline_pvt_tiny", 8192, "900MB", spill=True),
    **{f"deit-{side}": Case(DEIT, side) for side in (2048, 4096, 8192)},
    **{f"softmax-{side}": Case(SOFTMAX, side) for side in (1024, 1536, 2048)},
}


class SyntheticSource:
    """An image whose rows are those of a random strip, shifted from row to row: making them takes no time.

    Args:
        side: Its width and height.
    """

    def __init__(self, side: int) -> None:
        self.size, self.channels = (side, side), 3
        strip = torch.randn(3, 2 * side, generator=torch.Generator().manual_seed(0))
        # A view, (3, side + 1, side).
        self.image = strip.unfold(1, side, 1)

    def rows(self, top: int, bottom: int) -> Tensor:
        """See streaming.ImageSource.rows."""
        return self.image[:, top:bottom]


def measure(case: Case) -> dict[str, float]:
    """Run a case once in this process; returns seconds and peaks of resident memory, in GB."""
    torch.manual_seed(0)
    torch.set_num_threads(2)
    options: dict[str, Any] = {"dynamic_img_size": True} if case.is_softmax else {}
    model: Any = timm.create_model(case.model, **options).eval()
    if case.dtype is not None:
        model = inlinevit.optimize_for_inference(model, dtype=case.dtype)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        # What is loaded and packed at the first call is not measured.
        for side in (448, case.side):
            source = SyntheticSource(side)
            before, started = psutil.Process().memory_info().rss, time.perf_counter()
            if case.is_softmax:
                logits = model(source.rows(0, side)[None])
            else:
                spill = folder if case.spill else None
                logits = inlinevit.stream(model, source, memory=case.memory, spill=spill)
            seconds = time.perf_counter() - started
    assert logits.isfinite().all()
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"seconds": round(seconds, 2), "before_gb": round(before / 1e9, 3), "peak_gb": round(peak / 1e9, 3)}


def measure_apart(name: str) -> dict[str, Any]:
    """Run a case in a process of its own."""
    ended = subprocess.run([sys.executable, __file__, "--child", name], check=True, capture_output=True, text=True)
    return {**json.loads(ended.stdout.splitlines()[-1]), "load_before": round(psutil.getloadavg()[0], 2)}


def exponent(points: list[tuple[float, float]]) -> float:
    """Return the slope of a straight line through points in a double logarithmic plot, by least squares."""
    xs, ys = ([math.log(point[axis]) for point in points] for axis in (0, 1))
    x_mean, y_mean = sum(xs) / len(xs), sum(ys) / len(ys)
    products = sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True))
    return products / sum((x - x_mean) ** 2 for x in xs)


def measured(record: dict[str, dict[str, Any]], prefix: str) -> dict[float, dict[str, float]]:
    """Return the outcomes of a model at all its sizes with the same settings, by number of tokens."""
    sides = [case.side for name, case in CASES.items() if name == f"{prefix}{case.side}" and name in record]
    return {(side / PATCH) ** 2: record[f"{prefix}{side}"] for side in sorted(sides)}


def beyond_start(outcome: dict[str, float]) -> float:
    """Return the peak of memory beyond that before the call, in GB."""
    return max(1e-3, outcome["peak_gb"] - outcome["before_gb"])


def make_curves(record: dict[str, dict[str, Any]]) -> bytes:
    """Plot time and memory of both attentions over the number of tokens, as SVG."""
    times, memory = [], []
    inline, softmax = measured(record, "deit-"), measured(record, "softmax-")
    for style, outcomes in ((STYLES["inline"], inline), (STYLES["softmax"], softmax)):
        tokens = list(outcomes)
        times.append(Line(style, tokens, [one["seconds"] for one in outcomes.values()]))
        memory.append(Line(style, tokens, [beyond_start(one) for one in outcomes.values()]))
    first, last = max(softmax), max(inline)
    style = replace(STYLES["softmax"], name=f"{STYLES['softmax'].name}, extrapolated", dash=":", hollow=True)
    growth = last / first
    times.append(Line(style, [first, last], [softmax[first]["seconds"] * factor for factor in (1, growth**2)]))
    memory.append(Line(style, [first, last], [beyond_start(softmax[first]) * factor for factor in (1, growth)]))
    panels = [Panel("tokens", "seconds", times), Panel("tokens", "peak GB beyond the start", memory)]
    return svg_bytes(lines_figure(panels, log_x=True, log_y=True))


def make_table(record: dict[str, dict[str, Any]]) -> str:
    """Return the section of the page: a table, and how time and memory grow with the number of tokens."""
    headings = ["model", "image", "setting", "seconds", "peak, GB", "of which before the call"]
    rows: list[list[str]] = []
    for name, case in CASES.items():
        if name not in record:
            continue
        found = record[name]
        setting = "plain call" if case.is_softmax else f"memory {case.memory}" + ", in a file" * case.spill
        setting += f", {case.dtype}" if case.dtype else ""
        figures = [f"{found['seconds']:.1f}", f"{found['peak_gb']:.2f}", f"{found['before_gb']:.2f}"]
        rows.append([case.model, f"{case.side}²", setting, *figures])
    text = f"{markdown_table(Table(headings, rows, ''))}\n"
    lines = []
    fits: dict[str, dict[str, float]] = {}
    for label, prefix in (("InLine", "deit-"), ("softmax", "softmax-")):
        outcomes = measured(record, prefix)
        if len(outcomes) < 3:
            continue
        tokens = list(outcomes)
        sides = [int(PATCH * math.sqrt(number)) for number in tokens]
        times = list(zip(tokens, [one["seconds"] for one in outcomes.values()], strict=True))
        memory = [beyond_start(one) for one in outcomes.values()]
        growth = exponent(list(zip(tokens, memory, strict=True)))
        fits[label] = {"time": exponent(times), "last_tokens": tokens[-1], "last_seconds": times[-1][1]}
        fits[label]["bytes"] = 1e9 * memory[-1] / tokens[-1]
        lines.append(
            f"- **{label}**, {min(sides)}² to {max(sides)}²: time grows as tokens to the power of "
            f"{fits[label]['time']:.2f}, memory beyond that before the call to the power of {growth:.2f}."
        )
    if "softmax" in fits and "deit-16384" in record:
        softmax, tokens_16384 = fits["softmax"], (16384 / PATCH) ** 2
        # The quadratic part dominates at the largest size that was measured.
        hours = softmax["last_seconds"] * (tokens_16384 / softmax["last_tokens"]) ** 2 / 3600
        peak = 1e9 * beyond_start(record["deit-16384"])
        side = PATCH * math.sqrt(peak / softmax["bytes"])
        lines.append(
            f"- Extrapolated from its largest size by tokens², **softmax would take {hours:.1f} hours** for 16384². In "
            f"the memory that InLine takes there, {peak / 1e9:.2f} GB beyond the start, its activations would fit up "
            f"to about {side:,.0f}² (extrapolated as proportional to tokens)."
        )
    return text + "\n" + "\n".join(lines) + "\n"


def main() -> None:
    """Measure, and rewrite the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"measure these again: {', '.join(CASES)}")
    parser.add_argument("--table", action="store_true", help="rewrite the table only")
    parser.add_argument("--child", metavar="NAME", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(CASES[options.child])))
        return
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    names = options.names or [name for name in CASES if name not in record]
    for name in [] if options.table else names:
        record[name] = measure_apart(name)
        print(f"{name}: {record[name]}", flush=True)
        RECORD.parent.mkdir(parents=True, exist_ok=True)
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
    PAGE.write_text(replace_between(PAGE.read_text(), "record", make_table(record)))
    CURVES.write_bytes(make_curves(record))


if __name__ == "__main__":
    main()
