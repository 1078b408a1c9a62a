"""The tests: a package that mirrors src/inlinevit."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Numbers of the reference implementation.
GOLDEN = ROOT / "tests" / "golden"


def slow_except(values: Iterable[Any], *fast: Any) -> list[Any]:
    """Return the values as parameters of a test, all of them slow but those that are fast."""
    return [value if value in fast else pytest.param(value, marks=pytest.mark.slow) for value in values]


def pairs_of(first: Sequence[Any], second: Sequence[Any], third: Sequence[Any]) -> list[tuple[Any, Any, Any]]:
    """Return triples with every pair of values of two axes at least once: those of the first two axes exactly once."""
    assert min(len(first), len(second)) >= len(third)
    return [(a, b, third[(i + j) % len(third)]) for i, a in enumerate(first) for j, b in enumerate(second)]
