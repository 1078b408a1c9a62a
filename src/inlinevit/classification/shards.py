"""WebDataset: labelled images in tar files ("shards") that are read in a row."""

import io
import json
import tarfile
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from PIL import Image

# Endings of the images in a shard, and of the file with the label beside each.
IMAGE_KEYS = ("jpg", "jpeg", "png", "webp")
LABEL_KEY = "cls"
# Where timm keeps the lengths of shards.
INFO_NAMES = ("_info.json", "info.json")


class ShardSource:
    """The shards of one part of a data set.

    Args:
        shards: Their files.
        lengths: How many images of each to use.
    """

    # A label is a number, and nothing tells the name of its class.
    classes: list[str] | None = None

    def __init__(self, shards: Sequence[str], lengths: Sequence[int]) -> None:
        self.shards, self.lengths = shards, lengths

    def __len__(self) -> int:
        return sum(self.lengths)

    def thinned(self, count: int) -> "ShardSource":
        """So many of the images, at most: the first of each shard."""
        total = max(1, len(self))
        return ShardSource(self.shards, [min(length, length * count // total) for length in self.lengths])

    def read(self, shard: int) -> Iterator[dict[str, Any]]:
        """The images of a shard in their order, undecoded: dictionaries of what lies under one name."""
        import webdataset

        found = 0
        try:
            for sample in webdataset.tarfile_samples([{"url": self.shards[shard]}]):
                if any(key in sample for key in IMAGE_KEYS):
                    found += 1
                    yield sample
        except (tarfile.TarError, EOFError) as error:
            raise ValueError(
                f"{self.shards[shard]} is damaged or no plain tar file ({error.args[0]}): copy it anew"
            ) from error
        if found < self.lengths[shard]:
            raise ValueError(
                f"{self.shards[shard]} holds {found} images instead of {self.lengths[shard]}: copy it anew, or "
                f"correct {INFO_NAMES[0]}"
            )


class ShardImages:
    """Some images of shards, in memory: an ImageSource.

    Args:
        stored: What ShardSource.read gave.
    """

    classes: list[str] | None = None

    def __init__(self, stored: list[dict[str, Any]]) -> None:
        self.stored = stored

    def __len__(self) -> int:
        return len(self.stored)

    def read(self, index: int) -> tuple[Image.Image, int]:
        """See ImageSource.read."""
        sample = self.stored[index]
        if LABEL_KEY not in sample:
            raise ValueError(f"it has no .{LABEL_KEY} beside it")
        label = sample[LABEL_KEY].decode("utf-8", "replace").strip()
        if not label.isdecimal():
            raise ValueError(f"its label is {label[:40]!r}, which is no whole number")
        content = next(sample[key] for key in IMAGE_KEYS if key in sample)
        return Image.open(io.BytesIO(content)), int(label)

    def name(self, index: int) -> str:
        """See ImageSource.name."""
        sample = self.stored[index]
        return f"{sample['__key__']} in {sample['__url__']}"


def find_shards(place: str, names: Sequence[str], alone: bool) -> ShardSource:
    """The shards of one part of a data set.

    Args:
        place: Their folder, or their names as a brace pattern: data-{000..099}.tar.
        names: What the part may be called: in the folder's _info.json, as a folder, or at the beginning of the shards'
            names; or a brace pattern of shards in the folder.
        alone: Whether a folder or pattern without parts will do.
    """
    try:
        from webdataset.shardlists import expand_urls
    except ImportError as error:
        raise ValueError("wds/ needs the package webdataset: pip install 'inlinevit[data]'") from error
    if place.endswith(".tar"):
        if not alone:
            raise ValueError(f"{place} holds images for training: name those for evaluation with --data.eval_path")
        return _counted(expand_urls(place))
    folder = Path(place)
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder at {folder}: check --data.path and --data.root")
    parts = _read_info(folder)
    for name in names:
        if name in parts:
            shards, lengths = parts[name]
            return ShardSource([str(folder / shard) for shard in shards], lengths)
        if name.endswith(".tar"):
            return _counted(expand_urls(str(folder / name)))
        for pattern in (f"{name}/*.tar", f"{name}-*.tar", f"{name}_*.tar", f"{name}.tar"):
            if found := sorted(map(str, folder.glob(pattern))):
                return _counted(found)
    found = sorted(map(str, folder.glob("*.tar")))
    if not found or not alone:
        raise ValueError(
            f"{folder} has no shards of a part called {names[0]}: name its part with --data.train_split and "
            "--data.eval_split, or its shards as wds/FOLDER/NAME-{000..099}.tar"
        )
    return _counted(found)


def _read_info(folder: Path) -> dict[str, tuple[list[str], list[int]]]:
    """Shards and their lengths by the name of their part, as timm keeps them; nothing if there is no such file."""
    file = next((folder / name for name in INFO_NAMES if (folder / name).is_file()), None)
    if file is None:
        return {}
    try:
        parts = json.loads(file.read_text())["splits"]
        found = {
            name: (list(part["filenames"]), [int(n) for n in part["shard_lengths"]]) for name, part in parts.items()
        }
        assert all(len(shards) == len(lengths) for shards, lengths in found.values())
    except (ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
        raise ValueError(
            f"{file} does not give filenames and shard_lengths for each of its splits: correct or remove it"
        ) from error
    return found


def _counted(shards: list[str]) -> ShardSource:
    """Shards whose lengths are found by reading the names in them."""
    return ShardSource(shards, [_count_images(shard) for shard in shards])


def _count_images(shard: str) -> int:
    """How many samples of a shard have an image, by the names of its files."""
    from webdataset.tariterators import base_plus_ext

    if not Path(shard).is_file():
        raise FileNotFoundError(f"no shard at {shard}: check --data.path and the numbers in its braces")
    names = (base_plus_ext(item.name) for item in list_files(Path(shard)))
    samples = groupby((name for name in names if name[0] is not None), key=lambda name: name[0])
    return sum(any(ending.lower() in IMAGE_KEYS for _, ending in files) for _, files in samples)


def list_files(file: Path) -> list[tarfile.TarInfo]:
    """The files in a tar file that is not compressed."""
    try:
        with tarfile.open(file, "r:") as archive:
            members = [item for item in archive if item.isfile()]
            # Python takes a header that is cut off for the end.
            if 0 < file.stat().st_size - archive.offset < tarfile.BLOCKSIZE:
                raise tarfile.ReadError("unexpected end of data")
    except tarfile.TarError as error:
        raise ValueError(
            f"{file} is damaged or no plain tar file ({error}): copy it anew, or pack it without compression"
        ) from error
    return members
