"""The time of streamed blocks beside the block kernel that keeps the whole map, in ms per 4,096 tokens.

python tools/streamed_block_speed.py [--dims 64 128 192 320 512] [--side 64] [--rounds 20] [--threads 2]

summarize + apply is a streamed block. keys and values: what the first pass would take at least if it computed them,
instead of the covariance of the tokens. The fastest of several rounds counts.
"""

import argparse
import time
from collections.abc import Callable

import torch

from inlinevit import kernels
from inlinevit.layers import Block, InLineAttention
from inlinevit.layers._inference_block import pack_block
from inlinevit.report import Table, markdown_table

HEAD_DIM = 32
TOKENS = 4096


def fastest(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the shortest time of each call in ms; calls alternate, so that all see the same machine."""
    times = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, function in calls.items():
            begin = time.perf_counter()
            function()
            times[name] = min(times[name], 1e3 * (time.perf_counter() - begin))
    return times


def measure(dim: int, side: int, rounds: int, *, int8: bool) -> dict[str, float]:
    """Return the times for one width, per 4,096 tokens."""
    torch.manual_seed(0)
    attn = InLineAttention(dim, dim // HEAD_DIM)
    block = Block(attn, dim).eval().requires_grad_(False)
    packed = pack_block(block, int8=int8)
    assert packed is not None
    x = torch.randn(side * side, dim)
    out, windows = torch.empty_like(x), attn.layout((side, side))
    streamed = kernels.StreamedBlock(packed)
    moments = streamed.summarize(x)
    keys_and_values = kernels.pack_linear(torch.randn(2 * dim, dim), None, int8=int8)
    times = fastest(
        {
            "block": lambda: packed(x[None], windows),
            "summarize": lambda: streamed.summarize(x),
            "apply": lambda: streamed.apply(x, moments, side, None, None, out),
            "keys and values": lambda: kernels.linear(x, keys_and_values, 2 * dim),
        },
        rounds,
    )
    return {name: value * TOKENS / side**2 for name, value in times.items()}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128, 192, 320, 512], help="channels of the blocks")
    parser.add_argument("--side", type=int, default=64, help="height and width of the map, in tokens")
    parser.add_argument("--rounds", type=int, default=20, help="measurements of which the fastest counts")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = []
    for dim in options.dims:
        for int8 in (False, True):
            times = measure(dim, options.side, options.rounds, int8=int8)
            columns = (times["block"], times["summarize"], times["apply"], times["summarize"] + times["apply"])
            numbers = [f"{value:.2f}" for value in (*columns, times["keys and values"])]
            rows.append((str(dim), "int8" if int8 else "float32", *numbers))
    header = ("channels", "weights", "block", "summarize", "apply", "streamed", "keys and values")
    print(markdown_table(Table(header, rows, "ms per 4,096 tokens")))


if __name__ == "__main__":
    main()
