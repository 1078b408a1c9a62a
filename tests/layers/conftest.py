"""A slow reference of all attentions: a loop over images, windows and heads that sees real tokens alone."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from inlinevit import ops
from inlinevit.layers import (
    ATTENTIONS,
    AgentAttention,
    AngularAttention,
    BaseAttention,
    CirculantAttention,
    CrossStripes,
    EfficientAttention,
    EnhancedAttention,
    FocusedAttention,
    HydraAttention,
    InLineAttention,
    LinearAttention,
    MALAAttention,
    MHLAAttention,
    PolaFormerAttention,
    RALAAttention,
    SoftmaxAttention,
    SquareWindows,
    project_parameters,
)
from inlinevit.layers.focused_attention import KeyPositionAttention
from inlinevit.ops.windows import Windows


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
    height = -(-windows.map_height // windows.window_height) * windows.window_height
    width = -(-windows.map_width // windows.window_width) * windows.window_width
    found = []
    for top in range(0, height, windows.window_height):
        for left in range(0, width, windows.window_width):
            window = []
            for row in range(windows.window_height):
                for column in range(windows.window_width):
                    y, x = (top + row + windows.shift_up) % height, (left + column + windows.shift_left) % width
                    real = y < windows.map_height and x < windows.map_width
                    window.append(Slot(row, column, y, x, y * windows.map_width + x if real else None))
            found.append(window)
    return found


def sees(query: Slot, key: Slot) -> bool:
    """Whether two places of one window lie as far from each other on the map: nothing was rolled between them."""
    rows, columns = query.row - key.row, query.column - key.column
    return (query.map_row - key.map_row, query.map_column - key.map_column) == (rows, columns)


def head_groups_of(layout: object, size: tuple[int, int]) -> list[Windows]:
    """What the layouts should answer."""
    height, width = size
    if isinstance(layout, SquareWindows):
        window, shift = layout.window_size, layout.window_size // 2 if layout.shift > 0 else 0
        up, left = shift if window < height else 0, shift if window < width else 0
        return [Windows(height, width, min(window, height), min(window, width), shift_up=up, shift_left=left)]
    if isinstance(layout, CrossStripes):
        stripe = layout.stripe_width
        if stripe >= max(size):
            # Lengths over the channels of all heads are those of both halves then.
            return [Windows(height, width, height, width)]
        return [
            Windows(height, width, height, min(stripe, width), head_group=0, num_head_groups=2),
            Windows(height, width, min(stripe, height), width, head_group=1, num_head_groups=2),
        ]
    return [Windows(height, width, height, width)]


def window_map(values: Tensor, slots: list[Slot], windows: Windows) -> Tensor:
    """(real tokens, channels) as a map (1, channels, height, width) with zeros at padding."""
    out = torch.zeros(1, values.shape[1], windows.window_height, windows.window_width, dtype=values.dtype)
    for value, slot in zip(values, slots, strict=True):
        out[0, :, slot.row, slot.column] = value
    return out


def attention_reference(
    mixer: BaseAttention, x: Tensor, size: tuple[int, int], kernel_tokens: Tensor | None = None
) -> Tensor:
    """What mixer(x, size, kernel_tokens) should give."""
    kernel_tokens = x if kernel_tokens is None else kernel_tokens
    batch, tokens, dim = x.shape
    prefix, width = tokens - size[0] * size[1], mixer.head_dim
    out = torch.zeros_like(x)
    projected = x
    if isinstance(mixer, MHLAAttention):
        projected = F.layer_norm(x, (dim,), mixer.norm.weight, mixer.norm.bias, 1e-5)
    projected = projected @ mixer.qkv.weight.T + (0 if mixer.qkv.bias is None else mixer.qkv.bias)
    q, k, v = projected.split(dim, dim=-1)
    if isinstance(mixer, MHLAAttention):
        q, k = (
            y / (y.square().mean(dim=-1, keepdim=True) + torch.finfo(y.dtype).eps).sqrt() * norm.weight
            for y, norm in ((q, mixer.q_norm), (k, mixer.k_norm))
        )
    for windows in head_groups_of(mixer.layout, size):
        per_group = mixer.num_heads // windows.num_head_groups
        heads = range(windows.head_group * per_group, (windows.head_group + 1) * per_group)
        group = slice(heads.start * width, heads.stop * width)
        assert prefix == 0 or len(slots_of(windows)) == 1, "prefix tokens belong to no window"
        for image in range(batch):
            for slots in slots_of(windows):
                real = [slot for slot in slots if slot.token is not None]
                index = [*range(prefix), *(prefix + slot.token for slot in real)]
                window = Window(mixer, windows, real, prefix, heads)
                mix = MIX[type(mixer)]
                queries, keys, values = (t[image, index, group] for t in (q, k, v))
                if not mixer.rotates_in_attend:
                    queries, keys = window.rotated(queries), window.rotated(keys)
                mixed = mix(window, queries, keys, values)
                for head in heads:
                    channels = slice(head * width, (head + 1) * width)
                    own = window.channels(head)
                    values = v[image, index, channels]
                    mean = kernel_tokens[image, index, channels].mean(dim=0)
                    for kernel, bias in convolutions(mixer, mean, head):
                        mixed[prefix:, own] += convolve(window, values[prefix:], kernel, bias)
                out[image, index, group] = mixed
    if mixer.gate is not None:
        gate = x @ mixer.gate.weight.T + mixer.gate.bias
        out = out * (gate * gate.sigmoid() if isinstance(mixer, CirculantAttention) else gate)
    return out @ mixer.proj.weight.T + mixer.proj.bias


@dataclass
class Window:
    """Where the tokens of one window stand, for one head group."""

    mixer: BaseAttention
    windows: Windows
    # The real tokens of the map.
    slots: list[Slot]
    # Tokens before them.
    prefix: int
    heads: range

    def channels(self, head: int) -> slice:
        """The channels of a head within its head group."""
        first = (head - self.heads.start) * self.mixer.head_dim
        return slice(first, first + self.mixer.head_dim)

    def rotated(self, x: Tensor) -> Tensor:
        """x (tokens, channels of the head group) turned by row and column on the map, as complex numbers."""
        if not self.mixer.rope:
            return x
        pairs = self.mixer.head_dim // 4
        steps = [10000 ** (-m / max(1, pairs - 1)) for m in range(pairs)]
        places = [(0, 0)] * self.prefix + [(slot.map_row, slot.map_column) for slot in self.slots]
        turns = torch.tensor([[row * t for t in steps] + [column * t for t in steps] for row, column in places])
        turns = torch.polar(torch.ones_like(turns.double()), turns.double()).unsqueeze(1)
        numbers = torch.view_as_complex(x.unflatten(1, (-1, 2 * pairs, 2)).contiguous())
        return torch.view_as_real(numbers * turns).flatten(1)

    def places(self) -> list[int]:
        """Of each token, its place in the row of all tokens of the window, padding too."""
        return [*range(self.prefix), *(self.prefix + s.row * self.windows.window_width + s.column for s in self.slots)]


# The attention of one window: from q, k and v of the real tokens, (tokens, channels of the head group), to the same.


def mix_by_rows(window: Window, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax, linear and InLine attention, by their explicit forms."""
    mixer, out = window.mixer, torch.zeros_like(v)
    kind = next(word for word, mixer_class in ATTENTIONS.items() if isinstance(mixer, mixer_class))
    for head in window.heads:
        own = window.channels(head)
        options: dict[str, object] = {}
        queries = q[:, own]
        if isinstance(mixer, SoftmaxAttention):
            options["bias"] = softmax_bias(mixer, window.slots, head, window.prefix, q.dtype)
            if mixer.unit_queries:
                queries = torch.stack([query / query.norm() for query in queries])
        else:
            phi = mixer.feature_map
            options["feature_map"] = phi.name
            options["affine"] = None if phi.matrix is None else (phi.matrix[head], phi.bias[head])
        rows = ops.attention_weights(queries[None, None], k[None, None, :, own], kind=kind, **options)[0, 0]
        out[:, own] = rows @ v[:, own]
    return out


def mix_hydra(window: Window, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """φ(q) ⊙ Σ_j φ(k_j) ⊙ v_j, with φ(x) = x/‖x‖ over all channels."""
    total = torch.zeros_like(v[0])
    for key, value in zip(k, v, strict=True):
        total = total + key / key.norm() * value
    return torch.stack([query / query.norm() * total for query in q])


def mix_efficient(window: Window, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """ρ(q)·(ρ(K)ᵀV): q over the channels of a head, k over the tokens."""
    out = torch.zeros_like(v)
    for head in window.heads:
        own = window.channels(head)
        for i, query in enumerate(q[:, own].exp()):
            for channel, weight in enumerate(query / query.sum()):
                keys = k[:, own][:, channel].exp()
                out[i, own] += weight * (keys / keys.sum()) @ v[:, own]
    return out


def mix_angular(window: Window, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """u/‖u‖ + D(V), with u = ½v_i + (1/π)·q̂_i(K̂ᵀV). D goes along the row of all tokens, padding (zero) too."""
    out, places = torch.zeros_like(v), window.places()
    for head in window.heads:
        own, taps = window.channels(head), window.mixer.token_conv.weight[head, 0, :, 0]
        key_value = torch.stack([torch.outer(x / x.norm(), y) for x, y in zip(k[:, own], v[:, own], strict=True)])
        values = dict(zip(places, v[:, own], strict=True))
        for i, query in enumerate(q[:, own]):
            u = v[i, own] / 2 + query / query.norm() @ key_value.sum(dim=0) / math.pi
            near = [taps[tap] * values[places[i] + tap - 4] for tap in range(9) if places[i] + tap - 4 in values]
            out[i, own] = u / u.norm() + torch.stack(near).sum(dim=0)
    return out


def mix_enhanced(window: Window, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Linear attention of ReLU. Scores are scaled, so that the divisor's ε stands for a larger one here."""
    return mix_linearly(window, q.clamp(min=0), k.clamp(min=0), v, 1e-12 * window.mixer.head_dim**0.5)


def mix_focused(window: Window, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Linear attention of f(t) = t³·‖t‖/‖t³‖, t = (ReLU + 1e-6)/softplus(w); keys have positions."""
    mixer = window.mixer
    group = slice(window.heads.start * mixer.head_dim, window.heads.stop * mixer.head_dim)
    divisor = (1 + mixer.spread.flatten()[group].exp()).log()

    def focus(x: Tensor) -> Tensor:
        t = (x.clamp(min=0) + 1e-6) / divisor
        return t**3 * (t.norm() / (t**3).norm())

    keys = torch.stack([focus(key) for key in with_positions(window, k, "bicubic")])
    return mix_linearly(window, torch.stack([focus(query) for query in q]), keys, v, 1e-6)


def with_positions(window: Window, k: Tensor, mode: str) -> Tensor:
    """Keys (tokens, channels of the head group) with their learned positions, resized to the window."""
    mixer, windows = window.mixer, window.windows
    group = slice(window.heads.start * mixer.head_dim, window.heads.stop * mixer.head_dim)
    # Positions before those of the map are the prefix's; prefix tokens beyond num_prefix_tokens have none.
    own_prefix, (height, width) = mixer.num_prefix_tokens or 0, mixer.resample_pos_embed.grid
    table = mixer.pos_embed[0]
    maps = table[own_prefix:].view(1, height, width, -1).permute(0, 3, 1, 2)
    if (height, width) != (windows.window_height, windows.window_width):
        # As all positions are resized: in float32.
        new = (windows.window_height, windows.window_width)
        maps = F.interpolate(maps.float(), new, mode=mode, antialias=mode == "bicubic").to(maps.dtype)
    positions = [*table[:own_prefix], *torch.zeros(window.prefix - own_prefix, mixer.dim, dtype=k.dtype)]
    positions += [maps[0, :, slot.row, slot.column] for slot in window.slots]
    return k + torch.stack(positions)[:, group]


def elu_plus_one(x: Tensor) -> Tensor:
    return torch.where(x > 0, x + 1, x.exp())


def mix_mala(window: Window, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(1 + 1/(z + 1e-6))·s·q̃·(1/N Σ k̃ vᵀ) − z·v̄, with z = s·φ(q)·mean φ(k)."""
    q, k, out, scale = elu_plus_one(q), elu_plus_one(k), torch.zeros_like(v), window.mixer.head_dim**-0.5
    turned_q, turned_k = window.rotated(q), window.rotated(k)
    for head in window.heads:
        own = window.channels(head)
        key_value = turned_k[:, own].T @ v[:, own] / len(k)
        for i in range(len(q)):
            z = scale * q[i, own] @ k[:, own].mean(dim=0)
            out[i, own] = (1 + 1 / (z + 1e-6)) * scale * turned_q[i, own] @ key_value - z * v[:, own].mean(dim=0)
    return out


def mix_rala(window: Window, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q̃·Σ α k̃ vᵀ / (φ(q)·Σ α φ(k) + 1e-6), with α = softmax(s·mean φ(q)·φ(k))."""
    q, k, out, scale = elu_plus_one(q), elu_plus_one(k), torch.zeros_like(v), window.mixer.head_dim**-0.5
    turned_q, turned_k = window.rotated(q), window.rotated(k)
    for head in window.heads:
        own = window.channels(head)
        alpha = (scale * (k[:, own] @ q[:, own].mean(dim=0))).softmax(dim=0)
        key_value = sum(a * torch.outer(x, y) for a, x, y in zip(alpha, turned_k[:, own], v[:, own], strict=True))
        for i in range(len(q)):
            out[i, own] = turned_q[i, own] @ key_value / (q[i, own] @ (alpha @ k[:, own]) + 1e-6)
    return out


def mix_polaformer(window: Window, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Linear attention of signed powers: same signs for the first half of a head's values, opposite for the second."""
    mixer, out, half = window.mixer, torch.zeros_like(v), window.mixer.head_dim // 2
    k = with_positions(window, k, "bilinear")
    for head in window.heads:
        own, power = window.channels(head), 1 + 4 / (1 + (-mixer.power[head]).exp())
        divisor = (1 + mixer.spread[head].exp()).log()

        def signed(x: Tensor, sign: int, own: slice = own, power: Tensor = power, by: Tensor = divisor) -> Tensor:
            return (sign * x[:, own] / by).clamp(min=0) ** power

        keys = torch.cat([signed(k, 1), signed(k, -1)], dim=1)
        for part, sign in enumerate((1, -1)):
            values = v[:, own][:, part * half : (part + 1) * half]
            for i, query in enumerate(torch.cat([signed(q, sign), signed(q, -sign)], dim=1)):
                mean = (query @ keys.T) @ values / len(k)
                first = own.start + part * half
                out[i, first : first + half] = mean / (query @ keys.mean(dim=0) + 1e-6)
    return out


def mix_linearly(window: Window, q: Tensor, k: Tensor, v: Tensor, epsilon: float) -> Tensor:
    """q(Σ k vᵀ)/(q·Σ k + ε), head by head."""
    out = torch.zeros_like(v)
    for head in window.heads:
        own = window.channels(head)
        for i, query in enumerate(q[:, own]):
            scores = torch.stack([query @ key for key in k[:, own]])
            out[i, own] = scores @ v[:, own] / (scores.sum() + epsilon)
    return out


def mix_agent(window: Window, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(s·q aᵀ + B₂)·softmax(s·a kᵀ + B₁)·v, with agents that are means of the real tokens of a cell."""
    mixer, out, side = window.mixer, torch.zeros_like(v), window.mixer.agent_side
    height, width = window.windows.window_height, window.windows.window_width

    def resized(x: Tensor, *size: int) -> Tensor:
        return F.interpolate(x[None], size, mode="bilinear")[0]

    def members(cell: int) -> list[int]:
        first, last = (cell // side * height // side, -(-(cell // side + 1) * height // side))
        left, right = (cell % side * width // side, -(-(cell % side + 1) * width // side))
        found = (first <= slot.row < last and left <= slot.column < right for slot in window.slots)
        return [window.prefix + i for i, is_member in enumerate(found) if is_member]

    cells = [members(cell) for cell in range(side * side)]
    filled = [cell for cell, own in enumerate(cells) if own]
    for head in window.heads:
        own = window.channels(head)
        agents = torch.stack([q[cells[cell]][:, own].mean(dim=0) for cell in filled])
        of_keys = resized(mixer.key_map_bias[head], height, width) + resized(mixer.key_row_bias[head], height, 1)
        of_keys = of_keys + resized(mixer.key_column_bias[head], 1, width)
        of_queries = resized(mixer.query_map_bias[head], height, width)
        of_queries = of_queries + resized(mixer.query_row_bias[head].permute(2, 0, 1), height, 1)
        of_queries = of_queries + resized(mixer.query_column_bias[head].permute(2, 0, 1), 1, width)
        # (agents, tokens); prefix tokens have biases if their number was given.
        assert not mixer.num_prefix_tokens
        before = [torch.zeros(side * side, dtype=q.dtype)] * window.prefix
        biases = [
            torch.stack([*before, *(bias[:, slot.row, slot.column] for slot in window.slots)], dim=1)[filled]
            for bias in (of_queries, of_keys)
        ]
        scale = mixer.head_dim**-0.5
        to_agents = (scale * q[:, own] @ agents.T + biases[0].T).softmax(dim=1)
        to_keys = (scale * agents @ k[:, own].T + biases[1]).softmax(dim=1)
        out[:, own] = to_agents @ to_keys @ v[:, own]
    return out


def mix_mhla(window: Window, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """φ(q_i)·Σ_b M_{b(i)b} S_b over its divisor, pair by pair."""
    mixer, out = window.mixer, torch.zeros_like(v)
    high, wide = -(-window.windows.window_height // 4), -(-window.windows.window_width // 4)
    blocks = [slot.row // high * 4 + slot.column // wide for slot in window.slots]
    spots = [slot.row % high * wide + slot.column % wide for slot in window.slots]
    at = {pair: i for i, pair in enumerate(zip(blocks, spots, strict=True))}
    for head in window.heads:
        own = window.channels(head)
        queries, keys = q[:, own].clamp(min=0) + 1e-6, k[:, own].clamp(min=0) + 1e-6
        products = queries @ keys.T
        for i in range(len(q)):
            weights = torch.stack([mixer.mixing[blocks[i], block] for block in blocks])
            divisor = (weights * products[i]).sum()
            if mixer.shared_divisor:
                partners = [at.get((block, spots[i])) for block in blocks]
                seen = [j for j, partner in enumerate(partners) if partner is not None]
                divisor = sum(weights[j] * products[partners[j], j] for j in seen)
            out[i, own] = (weights * products[i]) @ v[:, own] / (divisor + 1e-6)
    return out


def mix_circulant(window: Window, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Σ_δ σ(δ) v(p+δ), shift by shift; what is seen of padding is divided away."""
    real = window_map(torch.ones_like(v[:, :1]), window.slots, window.windows)[0]
    q, k, v = (window_map(x, window.slots, window.windows)[0] for x in (q, k, v))
    shifts = [(-row, -column) for row in range(real.shape[1]) for column in range(real.shape[2])]
    scores = torch.stack([(q * torch.roll(k, shift, (1, 2))).sum(dim=(1, 2)) for shift in shifts])
    sigma = (scores / len(window.slots) ** 0.5).softmax(dim=0)[:, :, None, None]
    out, seen = (
        sum(weight * torch.roll(x, shift, (1, 2)) for weight, shift in zip(sigma, shifts, strict=True))
        for x in (v, real)
    )
    return torch.stack([(out / seen)[:, slot.row, slot.column] for slot in window.slots])


MIX: dict[type[BaseAttention], Callable[[Window, Tensor, Tensor, Tensor], Tensor]] = {
    SoftmaxAttention: mix_by_rows,
    LinearAttention: mix_by_rows,
    InLineAttention: mix_by_rows,
    HydraAttention: mix_hydra,
    EfficientAttention: mix_efficient,
    AngularAttention: mix_angular,
    EnhancedAttention: mix_enhanced,
    FocusedAttention: mix_focused,
    MALAAttention: mix_mala,
    RALAAttention: mix_rala,
    PolaFormerAttention: mix_polaformer,
    AgentAttention: mix_agent,
    MHLAAttention: mix_mhla,
    CirculantAttention: mix_circulant,
}


def convolutions(mixer: BaseAttention, mean: Tensor, head: int) -> list[tuple[Tensor, Tensor | None]]:
    """Kernels (width, 1, side, side) and biases of the convolutions of a head's values that are added."""
    channels = slice(head * mixer.head_dim, (head + 1) * mixer.head_dim)
    found: list[tuple[Tensor, Tensor | None]] = []
    if isinstance(mixer, InLineAttention) and mixer.local_residual is not None:
        found.append((head_kernel(mixer, mean, head), None))
    if isinstance(mixer, KeyPositionAttention) and mixer.conv is not None:
        found.append((mixer.conv.weight, mixer.conv.bias))
    if mixer.lepe is not None:
        found.append((mixer.lepe.weight[channels], mixer.lepe.bias[channels]))
    return found


def convolve(window: Window, values: Tensor, kernel: Tensor, bias: Tensor | None) -> Tensor:
    """The values (real tokens of the map, width) convolved over their window, zeros around and at padding."""
    maps = window_map(values, window.slots, window.windows)
    out = F.conv2d(maps, kernel, bias, padding=kernel.shape[-1] // 2, groups=len(kernel))
    return torch.stack([out[0, :, slot.row, slot.column] for slot in window.slots])


def head_kernel(mixer: InLineAttention, mean: Tensor, head: int) -> Tensor:
    """r = W₂·GELU(W₁·x̄) of one head, (width, 1, 3, 3)."""
    width, local = mixer.head_dim, mixer.local_residual
    first, second = slice(head * width, (head + 1) * width), slice(9 * head * width, 9 * (head + 1) * width)
    hidden = F.gelu(local.fc1.weight[first, :, 0] @ mean + local.fc1.bias[first])
    return (local.fc2.weight[second, :, 0] @ hidden + local.fc2.bias[second]).view(width, 1, 3, 3)


def softmax_bias(mixer: BaseAttention, slots: list[Slot], head: int, prefix: int, dtype: torch.dtype) -> Tensor:
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
    return attention_reference


@pytest.fixture(scope="session")
def randomise() -> Callable[[torch.nn.Module], torch.nn.Module]:
    def fill(module: torch.nn.Module) -> torch.nn.Module:
        """The module in float64, every parameter (biases and tables too) far from zero."""
        generator = torch.Generator().manual_seed(0)
        module = module.double()
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.data.add_(0.5 * noise)
        project_parameters(module)
        return module

    return fill


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
