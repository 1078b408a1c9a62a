"""What a study is made of: cells, claims about them, and how many runs each has."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Cell:
    """One model of a study.

    Attributes:
        key: Its name in folders; equal cells of several studies have the same key.
        label: Its name in tables.
        kwargs: Arguments of the model that replace those of the recipe.
        recipe: The recipe that it is trained by; its length is that of the runs.
        changes: Fields of the recipe that differ from it, besides the arguments of the model.
        is_generated: Whether it is trained on images that are drawn when they are read, not on CIFAR-10.
        group: The rows of a table that it is compared with, such as "32 pairs".
    """

    key: str
    label: str
    kwargs: dict[str, Any] = field(hash=False)
    recipe: str = "reproduce"
    changes: dict[str, Any] = field(default_factory=dict, hash=False)
    is_generated: bool = False
    group: str = ""


class Claim(NamedTuple):
    """An expectation: one cell has a higher accuracy than another."""

    text: str
    better: Cell
    worse: Cell


@dataclass(frozen=True)
class Study:
    """Cells, what is expected of them, and the number of runs of each.

    Attributes:
        title: Its heading.
        question: What it is about.
        cells: In the order of the table.
        claims: Expectations, of the paper or of what was measured before.
        seeds: Runs of a cell that a claim is about.
        other_seeds: Runs of the other cells.
        expectation: The heading of the claims.
    """

    title: str
    question: str
    cells: tuple[Cell, ...]
    claims: tuple[Claim, ...] = ()
    seeds: int = 3
    other_seeds: int = 1
    expectation: str = "the paper expects"

    def seeds_of(self, cell: Cell, seeds: int | None = None) -> int:
        """Return the number of runs of a cell; `seeds` replaces both numbers."""
        if seeds is not None:
            return seeds
        is_claimed = any(cell.key in (claim.better.key, claim.worse.key) for claim in self.claims)
        return self.seeds if is_claimed else self.other_seeds


class Run(NamedTuple):
    """A cell with a seed and, while the learning rate is being chosen, one of the rates."""

    cell: Cell
    seed: int
    rate: float | None = None

    @property
    def name(self) -> str:
        """The name of its folder."""
        if self.rate is not None:
            return f"rates/{self.cell.key}-lr{self.rate:g}"
        return f"{self.cell.key}-seed{self.seed}"


def attention_cell(key: str, label: str, attention: str, **attn_kwargs: Any) -> Cell:
    """Return a cell of the recipe "reproduce" with an attention and its options."""
    return Cell(key, label, {"attention": attention, **({"attn_kwargs": attn_kwargs} if attn_kwargs else {})})
