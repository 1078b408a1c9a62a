"""Time and memory of softmax and InLine attention on one image, from small to large: what small images cannot show."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import timm
import torch
from rich.console import Console
from torch import nn

from ...benchmark.memory import peak_memory
from ...benchmark.timing import interleave, quartiles
from ...report import STYLES, Line, Panel, Picture, Section, Table, Text, lines_figure

MODEL = "inline_deit_tiny"
ATTENTIONS = ("softmax", "inline")
# Sides of the image in pixels.
SIDES = (224, 384, 512, 768, 1024)
ROUNDS = 5
# Seconds of all measurements, and those of one size, after its first rounds.
BUDGET = 50.0
PATIENCE = 4.0
# Calls of each model per size, at least: a warm-up, three rounds, and one for the memory.
FEWEST_CALLS = 5
MEGABYTE = 1e6
# By which power of the side the time of a whole model grows, for an estimate: linear layers take much of it.
GROWTH = {"softmax": 3, "inline": 2}


@dataclass
class Cost:
    """The cost of one forward pass.

    Attributes:
        attention: Name of the attention.
        side: Side of the image in pixels.
        tokens: Tokens of its feature map.
        seconds: Median time.
        memory: Most bytes of activations at a time.
    """

    attention: str
    side: int
    tokens: int
    seconds: float
    memory: int


@torch.no_grad()
def measure_resolutions(device: torch.device, console: Console, sides: Sequence[int] = SIDES) -> list[Cost]:
    """Measure models that differ in attention only, with random weights, on one image of each size.

    A size whose measurement would exceed the budget, judging by the one before, ends the series.
    """
    costs: list[Cost] = []
    started = time.perf_counter()
    for place, side in enumerate(sides):
        if place and expected_seconds(costs, side) > BUDGET - (time.perf_counter() - started):
            break
        console.print(f"One image of {side} × {side} pixels: {' and '.join(ATTENTIONS)} attention")
        calls = {attention: forward(attention, side, device) for attention in ATTENTIONS}
        seconds = interleave(calls, rounds=ROUNDS, warmup=1, patience=PATIENCE, device=device)
        for attention, call in calls.items():
            tokens = (side // 16) ** 2
            median = quartiles(seconds[attention]).median
            costs.append(Cost(attention, side, tokens, median, peak_memory(call, device)))
    return costs


def forward(attention: str, side: int, device: torch.device) -> Callable[[], object]:
    """Return a function that runs a model on an image of noise."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = timm.create_model(MODEL, attention=attention, img_size=side).eval().to(device)
        image = torch.randn(1, 3, side, side).to(device)
    return lambda: model(image)


def expected_seconds(costs: Sequence[Cost], side: int) -> float:
    """Return how long the next size will take at least, from the time of the last one."""
    last = [cost for cost in costs if cost.side == costs[-1].side]
    return sum(FEWEST_CALLS * cost.seconds * (side / cost.side) ** GROWTH[cost.attention] for cost in last)


def resolution_section(costs: Sequence[Cost], sides: Sequence[int] = SIDES) -> Section:
    """Plot time and memory over the size of the image, and put the largest size into words."""
    by_attention = {name: [cost for cost in costs if cost.attention == name] for name in ATTENTIONS}
    time_lines, memory_lines = [], []
    for name, some in by_attention.items():
        x = [cost.side for cost in some]
        time_lines.append(Line(STYLES[name], x, [cost.seconds for cost in some]))
        memory_lines.append(Line(STYLES[name], x, [cost.memory / MEGABYTE for cost in some]))
    panels = [
        Panel("side of the image, pixels", "seconds per image", time_lines),
        Panel("side of the image, pixels", "peak memory, MB", memory_lines),
    ]
    measured = [cost.side for cost in by_attention["inline"]]
    rows = [
        (f"{side} × {side}", f"{one[0].tokens:,}", *(f"{1000 * cost.seconds:.0f}" for cost in one),
         *(f"{cost.memory / MEGABYTE:.0f}" for cost in one))
        for side in measured
        if (one := [cost for cost in costs if cost.side == side])
    ]  # fmt: skip
    names = [STYLES[name].name for name in ATTENTIONS]
    headings = ("image", "tokens", *(f"{name} ms" for name in names), *(f"{name} MB" for name in names))
    left_out = [side for side in sides if side not in measured]
    note = f" {left_out[0]} × {left_out[0]} and more would have taken too long here." if left_out else ""
    text = (
        f"DeiT-T with softmax and with InLine attention, random weights, one image per call, no gradients.{note} "
        "Softmax is computed by torch's fused kernel, which does not store the weights of all pairs: its time grows "
        "with the square of the tokens, its memory does not. The peak of the memory is in the MLPs, which both models "
        "share, so it says little about the attention."
    )
    alt = "Time and memory of softmax and InLine attention over the size of the image; the table has the numbers."
    blocks = [
        Text(resolution_verdict(costs), is_key=True),
        Picture(lines_figure(panels), alt, "Median time of a forward pass, and the peak of its activations."),
        Table(headings, rows, "One forward pass"),
        Text(text),
    ]
    data = {"model": MODEL, "costs": [vars(cost) for cost in costs], "left_out": left_out}
    return Section("resolution", "Large images", blocks, data)


def resolution_verdict(costs: Sequence[Cost]) -> str:
    """Return how the time of both attentions grows, and how they compare at the largest size."""
    first, last = costs[0].side, costs[-1].side
    found = {(cost.attention, cost.side): cost for cost in costs}
    softmax, inline = (found[name, last] for name in ATTENTIONS)
    ratio = softmax.seconds / inline.seconds
    slow, fast = (softmax, inline) if ratio >= 1 else (inline, softmax)
    names = {name: STYLES[name].name for name in ATTENTIONS}
    compared = (
        f"At {last} × {last} pixels, {names[slow.attention]} attention takes {max(ratio, 1 / ratio):.1f} times as long "
        f"as {names[fast.attention]} ({1000 * slow.seconds:.0f} and {1000 * fast.seconds:.0f} ms)."
    )
    if first == last:
        return f"{compared} Larger images would have taken too long here, so this does not show how the times grow."
    growth = {name: found[name, last].seconds / found[name, first].seconds for name in ATTENTIONS}
    tokens = found["inline", last].tokens / found["inline", first].tokens
    return (
        f"{compared} From {first} to {last} pixels there are {tokens:.0f} times as many tokens; "
        f"softmax takes {growth['softmax']:.0f} times as long, InLine {growth['inline']:.0f} times."
    )


def explore_section(command: str) -> Section:
    """Offer the explorer, which this command starts."""
    text = (
        f"{command} opens a page in your browser: click a patch of a test image, or of your own picture, and see which "
        "weights the three models give to all other patches, by layer and head."
    )
    return Section("explore", "See for yourself", [Text(text, is_key=True)], {"command": command})
