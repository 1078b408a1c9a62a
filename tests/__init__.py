"""The tests: a package that mirrors src/inlinevit."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Numbers of the reference implementation.
GOLDEN = ROOT / "tests" / "golden"
