"""The ways to compute InLine attention, and which of them is used when. All of them give the same result."""

from collections.abc import Callable
from typing import NamedTuple

import torch


class Case(NamedTuple):
    """Properties on which the choice of the path depends.

    Attributes:
        tokens: Keys of each window.
        channels: Width of all heads together.
        width: Width of a head.
        feature_map: φ.
        masked: Whether some tokens are padding.
        projected: Whether q, k and v are given. If not, the tokens and the projection weights are given.
        dtype: Of the tokens.
        device: Where they are, such as "cpu".
    """

    tokens: int
    channels: int
    width: int
    feature_map: str
    masked: bool
    projected: bool
    dtype: torch.dtype
    device: str


class Path(NamedTuple):
    """One way to compute InLine attention.

    Attributes:
        possible: Whether it can be used.
        pays: Whether it is the fastest.
    """

    possible: Callable[[Case], bool]
    pays: Callable[[Case], bool]


# In this order: the first that is possible and pays is used. `docs/performance.md` has the figures.
PATHS = {
    # Neither q nor k is computed: the weights of q and k are multiplied into the key-value covariance, which is then
    # applied to the tokens. Fewer products and copies where there are many tokens; half precision would lose digits.
    "folded": Path(
        possible=lambda case: not case.projected and not case.masked and case.feature_map == "identity",
        pays=lambda case: (
            case.tokens >= 2 * case.channels
            and case.dtype in (torch.float32, torch.float64)
            # On "meta" the nominal cost is counted, that of the covariance form.
            and case.device != "meta"
        ),
    ),
    # The tokens × tokens matrix, where it is smaller than a width × width one.
    "explicit": Path(
        possible=lambda case: True,
        pays=lambda case: case.tokens < case.width and not case.masked and case.device != "meta",
    ),
    # The queries are multiplied by the key-value covariance.
    "covariance": Path(possible=lambda case: True, pays=lambda case: True),
}


def choose_path(case: Case, forced: str | None = None) -> str:
    """Return the name of the path for this case.

    Args:
        case: Properties of the computation.
        forced: Use this path; it must be possible.
    """
    if forced is None:
        return next(name for name, path in PATHS.items() if path.possible(case) and path.pays(case))
    if forced not in PATHS:
        raise ValueError(f"unknown path {forced!r}: choose one of {', '.join(PATHS)}")
    if not PATHS[forced].possible(case):
        raise ValueError(
            f"path {forced!r} is not possible here: it needs a layer's tokens and weights rather than q, k and v, "
            "feature_map='identity', and one window that covers the whole map"
        )
    return forced
