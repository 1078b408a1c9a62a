"""Names of splits of a data set: the one that was given, or the usual ones."""

from collections.abc import Sequence
from dataclasses import dataclass

# Ways to spell the same split.
SPELLINGS = (("train", "training"), ("val", "validation", "valid", "eval", "evaluation"), ("test", "testing"))
# Names of a split that is not given, the first that exists.
TRAINING_NAMES, EVALUATION_NAMES = SPELLINGS[0], SPELLINGS[1] + SPELLINGS[2]


def spellings(name: str) -> tuple[str, ...]:
    """Return the name of a split, and other ways to spell it: val is validation, but never test."""
    others = next((names for names in SPELLINGS if name in names), ())
    return (name, *(other for other in others if other != name))


@dataclass(frozen=True)
class SplitRequest:
    """A split that is wanted.

    Attributes:
        name: As given by the user; None = not given.
        training: Whether it is for training or for evaluation.
    """

    name: str | None
    training: bool

    @property
    def option(self) -> str:
        """The option that names it."""
        return f"--data.{'train' if self.training else 'eval'}_split"

    def candidates(self) -> tuple[str, ...]:
        """Return its possible names in the data, the most likely first; empty if its name is not a plain file name."""
        if self.name is None:
            return TRAINING_NAMES if self.training else EVALUATION_NAMES
        # Joined with a folder, others would lead elsewhere.
        is_plain = self.name not in ("", ".", "..") and not set(self.name) & {"/", "\\", "\0"}
        return spellings(self.name) if is_plain else ()

    def missing(self, data: str, splits: Sequence[str]) -> str:
        """Return the message that data of this name do not have the split, and which splits they have."""
        wanted = repr(self.name) if self.name is not None else self.candidates()[0]
        if not splits:
            return f"{data} has no split called {wanted}, nor any other: name it with {self.option}"
        return f"{data} has no split called {wanted}: choose with {self.option} among {', '.join(splits)}"

    def require_undivided(self, data: str) -> None:
        """Refuse a name for a split of data that are not divided into splits."""
        if self.name is not None:
            raise ValueError(f"{data} is not divided, so it has no split called {self.name!r}: leave out {self.option}")

    def of_two(self, data: str) -> bool:
        """Whether the training part is meant of data that have two parts, one for training and one held out."""
        if self.name is None:
            return self.training
        if self.name not in TRAINING_NAMES + EVALUATION_NAMES:
            raise ValueError(self.missing(data, ("train", "test")))
        return self.name in TRAINING_NAMES
