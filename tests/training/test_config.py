"""What a training run can be told."""

from dataclasses import dataclass, field

from inlinevit.training.config import changed_fields


@dataclass
class Example:
    size: int = 3
    names: list[str] = field(default_factory=lambda: ["a"])
    path: str | None = None


def test_which_fields_were_changed() -> None:
    assert changed_fields(Example()) == {}
    assert changed_fields(Example(size=3, names=["a"])) == {}
    assert changed_fields(Example(names=["a", "b"], path="here")) == {"names": ["a", "b"], "path": "here"}
