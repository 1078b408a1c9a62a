"""A slow reference of all token mixers: a loop over images, windows and heads that sees real tokens alone."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from inlinevit import ops
from inlinevit.layers import ATTENTIONS, CrossStripes, InLineAttention, SquareWindows, TokenMixer
from inlinevit.layers.layouts import Windows


@dataclass
class Slot:
    """A place in a window, and the place of the map that comes to lie there."""

    row: int
    column: int
    map_row: int
    map_column: int
    # Index of the token; None for padding.
    token: int | None


def slots_of(windows: Windows) -> list[list[Slot]]:
    """For each window, row by row, its places, row by row: straight from the definition of rolling and cutting."""
    height = -(-windows.map_height // windows.height) * windows.height
    width = -(-windows.map_width // windows.width) * windows.width
    found = []
    for top in range(0, height, windows.height):
        for left in range(0, width, windows.width):
            window = []
            for row in range(windows.height):
                for column in range(windows.width):
                    y, x = (top + row + windows.shift_up) % height, (left + column + windows.shift_left) % width
                    real = y < windows.map_height and x < windows.map_width
                    window.append(Slot(row, column, y, x, y * windows.map_width + x if real else None))
            found.append(window)
    return found


def sees(query: Slot, key: Slot) -> bool:
    """Whether two places of one window lie as far from each other on the map: nothing was rolled between them."""
    rows, columns = query.row - key.row, query.column - key.column
    return (query.map_row - key.map_row, query.map_column - key.map_column) == (rows, columns)


def shares_of(layout: object, size: tuple[int, int]) -> list[Windows]:
    """What the layouts should answer."""
    height, width = size
    if isinstance(layout, SquareWindows):
        window, shift = layout.window_size, layout.window_size // 2 if layout.shift > 0 else 0
        up, left = shift if window < height else 0, shift if window < width else 0
        return [Windows(height, width, min(window, height), min(window, width), up, left, 0, 1)]
    if isinstance(layout, CrossStripes):
        stripe = layout.stripe_width
        return [
            Windows(height, width, height, min(stripe, width), 0, 0, 0, 2),
            Windows(height, width, min(stripe, height), width, 0, 0, 1, 2),
        ]
    return [Windows(height, width, height, width, 0, 0, 0, 1)]


def window_map(values: Tensor, slots: list[Slot], windows: Windows) -> Tensor:
    """(real tokens, channels) as a map (1, channels, height, width) with zeros at padding."""
    out = torch.zeros(1, values.shape[1], windows.height, windows.width, dtype=values.dtype)
    for value, slot in zip(values, slots, strict=True):
        out[0, :, slot.row, slot.column] = value
    return out


def mix_reference(mixer: TokenMixer, x: Tensor, size: tuple[int, int], context: Tensor | None = None) -> Tensor:
    """What mixer(x, size, context) should give."""
    context = x if context is None else context
    batch, tokens, dim = x.shape
    prefix, width = tokens - size[0] * size[1], mixer.head_dim
    kind = next(word for word, mixer_class in ATTENTIONS.items() if isinstance(mixer, mixer_class))
    out = torch.zeros_like(x)
    q, k, v = (x @ mixer.qkv.weight.T + (0 if mixer.qkv.bias is None else mixer.qkv.bias)).split(dim, dim=-1)
    for windows in shares_of(mixer.layout, size):
        per_share = mixer.num_heads // windows.shares
        heads = range(windows.share * per_share, (windows.share + 1) * per_share)
        assert prefix == 0 or len(slots_of(windows)) == 1, "prefix tokens belong to no window"
        for image in range(batch):
            for slots in slots_of(windows):
                real = [slot for slot in slots if slot.token is not None]
                index = [*range(prefix), *(prefix + slot.token for slot in real)]
                for head in heads:
                    channels = slice(head * width, (head + 1) * width)
                    qh, kh, vh = (t[image, index, channels] for t in (q, k, v))
                    options: dict[str, object] = {}
                    if kind == "softmax":
                        options["bias"] = softmax_bias(mixer, real, head, prefix, x.dtype)
                    else:
                        phi = mixer.feature_map
                        options["feature_map"] = phi.name
                        options["affine"] = None if phi.matrix is None else (phi.matrix[head], phi.bias[head])
                    rows = ops.attention_weights(qh[None, None], kh[None, None], kind=kind, **options)[0, 0]
                    mixed = rows @ vh
                    values = window_map(vh[prefix:], real, windows)
                    places = tuple(zip(*((slot.row, slot.column) for slot in real), strict=True))
                    if kind == "inline" and mixer.local_residual is not None:
                        mean = context[image, index, channels].mean(dim=0)
                        kernel = head_kernel(mixer, mean, head)
                        local = F.conv2d(values, kernel, padding=1, groups=width)[0]
                        mixed[prefix:] += local[:, places[0], places[1]].T
                    if mixer.lepe is not None:
                        weight, bias = mixer.lepe.weight[channels], mixer.lepe.bias[channels]
                        local = F.conv2d(values, weight, bias, padding=1, groups=width)[0]
                        mixed[prefix:] += local[:, places[0], places[1]].T
                    out[image, index, channels] = mixed
    return out @ mixer.proj.weight.T + mixer.proj.bias


def head_kernel(mixer: InLineAttention, mean: Tensor, head: int) -> Tensor:
    """r = W₂·GELU(W₁·x̄) of one head, (width, 1, 3, 3)."""
    width, local = mixer.head_dim, mixer.local_residual
    first, second = slice(head * width, (head + 1) * width), slice(9 * head * width, 9 * (head + 1) * width)
    hidden = F.gelu(local.fc1.weight[first, :, 0] @ mean + local.fc1.bias[first])
    return (local.fc2.weight[second, :, 0] @ hidden + local.fc2.bias[second]).view(width, 1, 3, 3)


def softmax_bias(mixer: TokenMixer, slots: list[Slot], head: int, prefix: int, dtype: torch.dtype) -> Tensor:
    """Relative position and seam of each pair, (1, 1, tokens, tokens)."""
    bias = torch.zeros(prefix + len(slots), prefix + len(slots), dtype=dtype)
    side = 2 * mixer.relative_window - 1
    for i, query in enumerate(slots):
        for j, key in enumerate(slots):
            if mixer.relative_window > 0:
                row = query.row - key.row + mixer.relative_window - 1
                column = query.column - key.column + mixer.relative_window - 1
                bias[prefix + i, prefix + j] = mixer.relative_position_bias_table[row * side + column, head]
            if not sees(query, key):
                bias[prefix + i, prefix + j] = -float("inf")
    return bias[None, None]


@pytest.fixture(scope="session")
def slots() -> Callable[[Windows], list[list[Slot]]]:
    return slots_of


@pytest.fixture(scope="session")
def may_see() -> Callable[[Slot, Slot], bool]:
    return sees


@pytest.fixture(scope="session")
def reference() -> Callable[..., Tensor]:
    return mix_reference


@pytest.fixture(scope="session")
def randomise() -> Callable[[torch.nn.Module], torch.nn.Module]:
    def fill(module: torch.nn.Module) -> torch.nn.Module:
        """The module in float64, every parameter (biases and tables too) far from zero."""
        generator = torch.Generator().manual_seed(0)
        module = module.double()
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.data.add_(0.5 * noise)
        return module

    return fill


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
