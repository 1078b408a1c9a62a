"""Measure whether the native kernels slow down torch's own operators in the same process.

Two pools of threads share the cores: one whose threads spin after a call takes time from the other. An eager matmul and
GELU are timed before, between and after calls of a native block. Before and after, the same products are computed by
torch in between, so that the caches are as cold; only the matmul and GELU are counted.

    python tools/kernel_neighbours.py --threads 2
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inlinevit import kernels


def measure(eager: Callable[[], object], repeats: int, before: Callable[[], object]) -> list[float]:
    """Return the times of eager operators in milliseconds, with another call before each of them."""
    times = []
    for _ in range(repeats):
        before()
        start = time.perf_counter()
        eager()
        times.append(1e3 * (time.perf_counter() - start))
    return times


def main() -> None:
    """Print the times of eager operators before, between and after calls of a kernel, and their ratios."""
    parser = argparse.ArgumentParser(description="Do the native kernels slow down torch's own operators?")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads of torch and the kernels")
    parser.add_argument("--repeats", type=int, default=100, help="eager calls per phase and round")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of the three phases")
    arguments = parser.parse_args()
    if not kernels.available():
        parser.exit(1, f"the native kernels are not available: {kernels.status().reason}\n")
    torch.set_num_threads(arguments.threads)
    torch.set_grad_enabled(False)
    height, width, dim = 14, 14, 192
    # The timed layer is none of the block's: its weights are equally cold after both.
    timed, qkv, proj = nn.Linear(dim, 4 * dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
    fc1, fc2, norm = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim), nn.LayerNorm(dim)
    packed = kernels.pack_block(norm1=norm, qkv=qkv, proj=proj, norm2=norm, fc1=fc1, fc2=fc2, num_heads=dim // 32)
    x, hidden = torch.randn(1, height * width, dim), torch.randn(1, height * width, 4 * dim)

    def eager() -> Tensor:
        return F.gelu(timed(x))

    def native_block() -> Tensor:
        return packed(x, [(height, width, height, width, 0, 0, 0, 1)])

    def eager_products() -> list[Tensor]:
        return [qkv(x), proj(x), fc1(x), fc2(hidden)]

    times: dict[str, list[float]] = {"before": [], "between": [], "after": []}
    for _ in range(arguments.rounds):
        # The kernels' threads go to sleep within a fraction of this.
        time.sleep(0.1)
        times["before"] += measure(eager, arguments.repeats, eager_products)
        times["between"] += measure(eager, arguments.repeats, native_block)
        times["after"] += measure(eager, arguments.repeats, eager_products)
    alone = {"median": statistics.median(times["before"]), "minimum": min(times["before"])}
    print(f"{arguments.threads} threads, {kernels.status().reason}")
    for phase, values in times.items():
        median, minimum = statistics.median(values), min(values)
        print(
            f"{phase:8} median {median:6.3f} ms ({median / alone['median']:.2f}), "
            f"minimum {minimum:6.3f} ms ({minimum / alone['minimum']:.2f})"
        )


if __name__ == "__main__":
    main()
