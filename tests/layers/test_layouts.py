"""Cutting maps into windows, against a count of places by hand."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inlinevit.layers import CrossStripes, SquareWindows, WholeMap
from inlinevit.ops.windows import (
    Windows,
    covers_map,
    padded_size,
    shift_mask,
    take_head_group,
    window_mask,
    window_partition,
    window_reverse,
)

CPU = torch.device("cpu")
PROPERTY = settings(deadline=None, max_examples=60, derandomize=True)
sizes = st.tuples(st.integers(1, 15), st.integers(1, 15))
layouts = st.one_of(
    st.builds(WholeMap),
    st.builds(lambda n, shifted: SquareWindows(n, shifted=shifted), st.integers(1, 8), st.booleans()),
    st.builds(CrossStripes, st.integers(1, 8)),
)
all_layouts = given(layout=layouts, size=sizes)


@PROPERTY
@all_layouts
def test_cut_puts_every_token_in_its_place_and_merge_puts_it_back(slots, layout, size):
    x = torch.arange(1.0, 1 + 2 * size[0] * size[1] * 3).view(2, -1, 3)
    for windows in layout(size):
        cut = window_partition(x, windows)
        places = slots(windows)
        assert cut.shape == (2 * len(places), windows.window_height * windows.window_width, 3)
        index = torch.tensor([[-1 if slot.token is None else slot.token for slot in window] for window in places])
        expected = x[:, index.clamp(min=0)] * (index >= 0)[:, :, None]
        assert torch.equal(cut, expected.flatten(0, 1))
        assert torch.equal(window_reverse(cut, windows), x)


@PROPERTY
@all_layouts
def test_window_mask_marks_exactly_the_padding(slots, layout, size):
    for windows in layout(size):
        real = torch.tensor([[slot.token is not None for slot in window] for window in slots(windows)])
        mask = window_mask(windows, CPU)
        assert (mask is None) == bool(real.all())
        if mask is not None:
            assert torch.equal(mask, real)
        assert real.any(dim=1).all(), "a window of nothing but padding has no mean"


@PROPERTY
@given(window_size=st.integers(1, 8), size=sizes)
def test_shift_mask_lets_only_neighbours_on_the_map_see_each_other(slots, may_see, window_size, size):
    (windows,) = SquareWindows(window_size, shifted=True)(size)
    seen = torch.tensor([[[may_see(a, b) for b in window] for a in window] for window in slots(windows)])
    mask = shift_mask(windows, CPU)
    assert (mask is None) == (windows.shift_up == 0 and windows.shift_left == 0)
    if mask is None:
        assert seen.all()
    else:
        assert torch.equal(mask, seen)
        assert not mask.all()


def test_square_windows_unshifted_have_no_shift_mask():
    assert shift_mask(SquareWindows(3, shifted=False)((9, 9))[0], CPU) is None


@PROPERTY
@given(window_size=st.integers(1, 8), size=sizes, shifted=st.booleans())
def test_square_windows(window_size, size, shifted):
    """Axis by axis: a window that covers it is the map, unshifted; else it is shifted by half a window."""
    (windows,) = SquareWindows(window_size, shifted=shifted)(size)
    axes = [(size[0], windows.window_height, windows.shift_up), (size[1], windows.window_width, windows.shift_left)]
    for length, window, shift in axes:
        assert window == min(window_size, length)
        assert shift == (window_size // 2 if shifted and window_size < length else 0)
    assert (windows.map_height, windows.map_width, windows.head_group, windows.num_head_groups) == (*size, 0, 1)
    assert covers_map(windows) == (window_size >= max(size))


def test_covering_windows_do_not_touch_the_tokens():
    x = torch.rand(2, 12 + 1, 5)  # a prefix token too
    for layout in (WholeMap(), SquareWindows(4, shifted=True), CrossStripes(4)):
        (windows,) = layout((3, 4))
        assert windows == Windows(3, 4, 3, 4)
        assert torch.equal(window_partition(x, windows), x)
        assert torch.equal(window_reverse(x, windows), x)


def test_cross_stripes_halves():
    """Upright stripes for the first half of the heads, lying ones for the second."""
    upright, lying = CrossStripes(2)((6, 7))
    assert upright == Windows(6, 7, 6, 2, head_group=0, num_head_groups=2)
    assert lying == Windows(6, 7, 2, 7, head_group=1, num_head_groups=2)
    assert padded_size(upright) == (6, 8)
    assert padded_size(lying) == (6, 7)
    parameter = torch.arange(12).view(6, 2)
    assert torch.equal(take_head_group(parameter, upright), parameter[:3])
    assert torch.equal(take_head_group(parameter, lying), parameter[3:])


@PROPERTY
@given(stripe=st.integers(1, 8), size=sizes)
def test_cross_stripes_run_through_the_map(stripe, size):
    shares = CrossStripes(stripe)(size)
    if stripe >= max(size):
        assert [covers_map(windows) for windows in shares] == [True]
    else:
        assert [(w.window_height, w.window_width) for w in shares] == [
            (size[0], min(stripe, size[1])),
            (min(stripe, size[0]), size[1]),
        ]
        assert [(w.head_group, w.num_head_groups) for w in shares] == [(0, 2), (1, 2)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtype_is_kept(dtype):
    (windows,) = SquareWindows(4, shifted=True)((5, 6))
    x = torch.rand(2, 30, 3).to(dtype)
    cut = window_partition(x, windows)
    assert cut.dtype == dtype
    assert torch.equal(window_reverse(cut, windows), x)


def test_windows_of_no_size_are_refused():
    with pytest.raises(ValueError, match="window_size must be at least 1"):
        SquareWindows(0, shifted=False)
    with pytest.raises(ValueError, match="stripe_width must be at least 1"):
        CrossStripes(0)
