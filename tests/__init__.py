"""The tests: a package that mirrors src/inlinevit."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Numbers of the reference implementation.
GOLDEN = ROOT / "tests" / "golden"


def slow_except(values: Iterable[Any], *fast: Any) -> list[Any]:
    """Return the values as parameters of a test, all of them slow but those that are fast."""
    return [value if value in fast else pytest.param(value, marks=pytest.mark.slow) for value in values]
