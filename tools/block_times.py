"""Measure each native block inside a model: python tools/block_times.py inline_swin_tiny --size 224.

Blocks are called one by one, in the order of the forward pass, so that each finds the caches as the others left them.
GFLOP/s are nominal: of the linear layers, and of the covariance and its product with the queries.
"""

import argparse
from collections import defaultdict
from statistics import median
from time import perf_counter
from typing import Any

import timm
import torch
from torch import Tensor

import inlinevit
from inlinevit.layers import Block
from inlinevit.report import Table, markdown_table


def main() -> None:
    """Print a row for each kind of block."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--size", type=int, default=224, help="side of the image")
    parser.add_argument("--dtype", choices=["int8"], help="as for optimize_for_inference")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = inlinevit.optimize_for_inference(timm.create_model(options.model), dtype=options.dtype)
    seconds: dict[str, list[float]] = defaultdict(list)
    shapes: dict[str, tuple[int, ...]] = {}
    blocks: dict[str, Any] = {name: module for name, module in model.named_modules() if isinstance(module, Block)}

    def time_block(name: str, block: Any) -> None:
        forward = block.forward

        def timed(x: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
            started = perf_counter()
            out = forward(x, *arguments, **keywords)
            seconds[name].append(perf_counter() - started)
            shapes[name] = tuple(x.shape[1:])
            return out

        block.forward = timed

    for name, block in blocks.items():
        time_block(name, block)
    image = torch.randn(1, 3, options.size, options.size)
    with torch.inference_mode():
        for _ in range(options.rounds):
            model(image)
    kinds: dict[tuple[int, ...], list[float]] = defaultdict(list)
    for name, block in blocks.items():
        width = block.attn.dim // block.attn.num_heads
        kinds[*shapes[name], block.mlp.fc1.out_features, width].append(median(seconds[name][5:]))
    rows = []
    for (tokens, channels, hidden, width), times in kinds.items():
        flops = 2 * tokens * channels * (4 * channels + 2 * hidden + 2 * width)
        mean = sum(times) / len(times)
        rows.append((str(tokens), str(channels), str(len(times)), f"{mean * 1e3:.2f}", f"{flops / mean / 1e9:.0f}"))
    headings = ("tokens", "channels", "blocks", "ms per block", "GFLOP/s")
    print(markdown_table(Table(headings, rows, f"Blocks of {options.model} at {options.size}²")))


if __name__ == "__main__":
    main()
