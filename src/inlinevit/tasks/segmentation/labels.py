"""What the values of pixels in a label map mean: classes, and what does not count."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...utils.files import read_yaml
from ...utils.validation import did_you_mean, shorten
from .config import SegmentationDataConfig

# The index of pixels that never count, in tensors.
IGNORED = 255
# In a table of indices: a value that a label map should not have.
UNKNOWN = -1
# Label maps of bytes can then still have 0 and 255 for what does not count.
FEWEST_CLASSES, MOST_CLASSES = 2, 254
# Values of a PNG with 16 bits a pixel.
VALUES = 65536
BYTES = 256
Colour = tuple[int, int, int]


class SegmentationClass(NamedTuple):
    """A class of pixels: its name, its values in label maps, and its colour in drawings."""

    name: str
    values: list[int]
    colour: Colour


class LabelMap:
    """Translates the values of pixels in files to the indices of classes, and back.

    Args:
        classes: The classes, in the order of their indices.
        ignored: Values of pixels that do not count.

    Attributes:
        lookup: (65536,) from a value to the index of its class, IGNORED or UNKNOWN.
    """

    def __init__(self, classes: list[SegmentationClass], ignored: list[int]) -> None:
        self.classes, self.ignored = classes, ignored
        self.lookup = torch.full((VALUES,), UNKNOWN, dtype=torch.int16)
        self.lookup[ignored] = IGNORED
        for index, one in enumerate(classes):
            self.lookup[one.values] = index

    @classmethod
    def from_plain(cls, plain: Any, origin: str | Path) -> "LabelMap":
        """Return the label map that the content of a file describes; see `read_labels`.

        Args:
            plain: The content: dicts, lists, numbers and words.
            origin: The file, for messages.
        """
        layout = "write `ignored: [0]` and `classes:`, a list of `name: road` with `values: [1]`"
        if not isinstance(plain, dict) or not isinstance(plain.get("classes"), list):
            raise ValueError(f"{origin} has no list of classes: {layout}")
        _refuse_unknown(plain, ("ignored", "classes"), str(origin))
        records = plain["classes"]
        if not FEWEST_CLASSES <= len(records) <= MOST_CLASSES:
            raise ValueError(f"{origin} has {len(records)} classes: give it from {FEWEST_CLASSES} to {MOST_CLASSES}")
        meanings: dict[int, str] = {}
        ignored = _values(plain.get("ignored", []), "ignored", origin, meanings)
        names: list[str] = []
        values: list[list[int]] = []
        stated: list[Colour | None] = []
        for number, record in enumerate(records, start=1):
            name = record.get("name") if isinstance(record, dict) else None
            # YAML takes 7 for a number and no for a truth.
            if not isinstance(name, str) or not name.strip():
                raise ValueError(f"class {number} in {origin} has no name: give it one, in quotes if need be")
            title = f"class {shorten(name)} in {origin}"
            _refuse_unknown(record, SegmentationClass._fields, title)
            if name in names:
                raise ValueError(f"{origin} has two classes called {shorten(name)}: give one of them another name")
            names.append(name)
            values.append(_values(record.get("values"), shorten(name), origin, meanings))
            if not values[-1]:
                raise ValueError(f"{title} has no values: add them, such as `values: [{number}]`")
            stated.append(_colour(record.get("colour"), title))
        return cls(list(map(SegmentationClass, names, values, fill_in_colours(stated))), ignored)

    def to_plain(self) -> dict[str, Any]:
        """Return what `from_plain` takes, for YAML and JSON."""
        classes = [{**one._asdict(), "colour": list(one.colour)} for one in self.classes]
        return {"ignored": self.ignored, "classes": classes}

    def to_indices(self, values: NDArray[Any] | Tensor) -> Tensor:
        """Return the class of each pixel, (height, width) of bytes; IGNORED where it does not count.

        Args:
            values: (height, width), as in a file; those without a meaning are refused.
        """
        wide = torch.as_tensor(np.asarray(values, dtype=np.int64))
        known = wide.clamp(0, VALUES - 1)
        indices = self.lookup[known]
        strange = (indices == UNKNOWN) | (known != wide)
        if strange.any():
            raise ValueError(
                f"it has pixels of the value {int(wide[strange][0])}, which is neither one of the "
                f"{len(self.classes)} classes nor ignored"
            )
        return indices.to(torch.uint8)

    def to_values(self, indices: Tensor) -> Tensor:
        """Return the first value of the class of each pixel, in bytes if all values fit, otherwise in 16 bits.

        Args:
            indices: (height, width) of whole numbers: indices of classes, or IGNORED.
        """
        # Where nothing is ignored, there is no value for it, and no pixel needs one.
        table = np.zeros(BYTES, np.int64)
        table[: len(self.classes)] = [one.values[0] for one in self.classes]
        table[IGNORED] = self.ignored[0] if self.ignored else 0
        kind = np.uint8 if table.max() < BYTES else np.uint16
        return torch.from_numpy(table.astype(kind)[indices.cpu().numpy()])


def ade_labels(num_classes: int) -> LabelMap:
    """Return labels as ADE20K has them: 0 is ignored, and n is the class with the index n - 1, called by its number."""
    if not FEWEST_CLASSES <= num_classes <= MOST_CLASSES:
        raise ValueError(f"model.num_classes is {num_classes}: it should be from {FEWEST_CLASSES} to {MOST_CLASSES}")
    colours = fill_in_colours([None] * num_classes)
    return LabelMap([SegmentationClass(str(n), [n], colour) for n, colour in enumerate(colours, start=1)], [0])


def read_labels(file: str | Path) -> LabelMap:
    """Read a label map from a YAML file.

    ::

        ignored: [0, 255]
        classes:
          - name: road
            values: [7, 8]
            colour: [128, 64, 128]   # optional
    """
    path = Path(file).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"no file of labels at {path}: name another one with --data.labels")
    try:
        plain = read_yaml(path)
    except ValueError as error:
        raise ValueError(f"{path} is not valid YAML ({error}): fix it, or name another file") from error
    return LabelMap.from_plain(plain, path)


def open_labels(config: SegmentationDataConfig, num_classes: int | None) -> LabelMap:
    """Open the labels of the data: their file, or those of ADE20K.

    Args:
        config: Names the file, if there is one.
        num_classes: How many classes the model is to have; None = as many as the file says.
    """
    if config.labels is None:
        if num_classes is None:
            raise ValueError(
                "nothing says how many classes there are: set --model.num_classes (150 for ADE20K), or name a file of "
                "labels with --data.labels"
            )
        return ade_labels(num_classes)
    labels = read_labels(config.labels)
    if num_classes not in (None, len(labels.classes)):
        raise ValueError(
            f"{config.labels} has {len(labels.classes)} classes, but model.num_classes is {num_classes}: leave it out, "
            "or name another file"
        )
    return labels


def fill_in_colours(stated: Sequence[Colour | None]) -> list[Colour]:
    """A colour for each class: the one that is stated, or the next one that no class has yet."""
    unused = (colour for colour in map(voc_colour, range(1, BYTES)) if colour not in stated)
    return [next(unused) if colour is None else colour for colour in stated]


def voc_colour(number: int) -> Colour:
    """A colour of the map that PASCAL VOC has made common: 0 is black, and numbers up to 255 have different colours.

    The bits of the number go to red, green and blue in turn, the lowest to the highest bits of these.
    """
    red, green, blue = (
        sum((number >> (3 * place + channel) & 1) << (7 - place) for place in range(3)) for channel in range(3)
    )
    return red, green, blue


def _refuse_unknown(record: dict[Any, Any], known: Sequence[str], name: str) -> None:
    unknown = [str(key) for key in record if key not in known]
    if unknown:
        remedy = did_you_mean(unknown[0], known) or f"there are {', '.join(known)}"
        raise ValueError(f"{name} has a field {shorten(unknown[0])}, which means nothing here: {remedy}")


def _values(values: Any, meaning: str, origin: str | Path, meanings: dict[int, str]) -> list[int]:
    """A list of values, checked; adds them to those whose meaning is known."""
    values = [] if values is None else values
    if not isinstance(values, list) or not all(type(value) is int and 0 <= value < VALUES for value in values):
        raise ValueError(
            f"{origin} has the values {values!r:.100} for {meaning}: write a list of whole numbers from 0 to "
            f"{VALUES - 1}, such as [7, 8]"
        )
    for value in values:
        if value in meanings:
            raise ValueError(
                f"{origin} has the value {value} twice, for {meanings[value]} and for {meaning}: remove one of them"
            )
        meanings[value] = meaning
    return values


def _colour(colour: Any, name: str) -> Colour | None:
    if colour is None:
        return None
    if not (isinstance(colour, list) and len(colour) == 3 and all(type(c) is int and 0 <= c < BYTES for c in colour)):
        raise ValueError(
            f"{name} has the colour {colour!r:.100}: write red, green and blue from 0 to 255, such as [128, 64, 128]"
        )
    red, green, blue = colour
    return red, green, blue
