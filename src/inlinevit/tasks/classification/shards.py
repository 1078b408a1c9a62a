"""WebDataset: labelled images in tar files ("shards") that are read sequentially.

Names of shards come out of folders and files that others have made. webdataset would take some of them for commands or
addresses (`pipe:…`, `http:…`), so it never gets a name: shards are local files, checked and opened here.
"""

import glob
import io
import re
import tarfile
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path, PurePath
from typing import Any, BinaryIO

from ...data.images import open_image
from ...data.pixels import AnyImage
from ...utils.files import is_inside, open_regular, read_json
from ...utils.validation import has_type
from .splits import SplitRequest, spellings

# Extensions of the images in a shard, and of the file with the label beside each.
IMAGE_KEYS = ("jpg", "jpeg", "png", "webp")
LABEL_KEY = "cls"
# Where timm keeps the lengths of shards.
INFO_NAMES = ("_info.json", "info.json")
# What libraries take for the beginning of an address or a command.
SCHEME = re.compile(r"\w[\w+.-]*:")
# What damaged and hostile headers can make tarfile raise.
TAR_ERRORS = (tarfile.TarError, EOFError, MemoryError, OverflowError, RecursionError, ValueError)


class ShardSource:
    """The shards of one split of a data set, and how many images of each to use."""

    # Labels are numbers: the names of their classes are not known.
    classes: list[str] | None = None

    def __init__(self, shards: Sequence[str], lengths: Sequence[int]) -> None:
        self.shards, self.lengths = shards, lengths

    def __len__(self) -> int:
        return sum(self.lengths)

    def subset(self, count: int) -> "ShardSource":
        """Return at most this number of images: the first of each shard."""
        total = max(1, len(self))
        return ShardSource(self.shards, [min(length, length * count // total) for length in self.lengths])

    def read(self, shard: int) -> Iterator[dict[str, Any]]:
        """Yield the images of a shard in their order, undecoded: the contents of files with one name, by extension.

        Raises:
            OSError: It cannot be opened, or it is not a regular file.
            ValueError: It is damaged, or has fewer images than it should.
        """
        name = self.shards[shard]
        found = 0
        with open_regular(name) as stream:
            for sample in _samples(stream, name):
                if any(key in sample for key in IMAGE_KEYS):
                    found += 1
                    yield sample
        if found < self.lengths[shard]:
            raise ValueError(
                f"{name} holds {found} images instead of {self.lengths[shard]}: copy it again, or correct "
                f"{INFO_NAMES[0]}"
            )


class ShardImages:
    """An ImageSource of images of shards that are in memory, as ShardSource.read yields them."""

    classes: list[str] | None = None

    def __init__(self, stored: list[dict[str, Any]]) -> None:
        self.stored = stored

    def __len__(self) -> int:
        return len(self.stored)

    def read(self, index: int) -> tuple[AnyImage, int]:
        sample = self.stored[index]
        if LABEL_KEY not in sample:
            raise ValueError(f"it has no .{LABEL_KEY} beside it")
        label = sample[LABEL_KEY].decode("utf-8", "replace").strip()
        if not label.isdecimal():
            raise ValueError(f"its label is {label[:40]!r}, which is not a whole number")
        content = next(sample[key] for key in IMAGE_KEYS if key in sample)
        return open_image(io.BytesIO(content)), int(label)

    def name(self, index: int) -> str:
        sample = self.stored[index]
        return f"{sample['__key__']} in {sample['__url__']}"


def find_shards(place: str, request: SplitRequest, is_alone: bool) -> ShardSource:
    """Find the shards of one split of a data set.

    Args:
        place: Their folder, or their names as a brace pattern: data-{000..099}.tar.
        request: The split: a name in the folder's _info.json, a folder in it, or the beginning of the shards' names; or
            a brace pattern of shards in the folder.
        is_alone: Whether a folder or pattern without splits will do.

    Raises:
        OSError: A shard does not exist or is not a regular file.
        ValueError: There is no such split, or a shard has a name that is not that of a file in the folder.
    """
    try:
        import webdataset  # noqa: F401
    except ImportError as error:
        raise ValueError("wds/ needs the package webdataset: pip install 'inlinevit[data]'") from error
    if SCHEME.match(place):
        raise ValueError(f"wds/{place} is an address or a command: name a folder or tar files of this machine")
    folder = Path(place)
    if place.endswith(".tar") and not folder.is_dir():
        if not is_alone:
            raise ValueError(f"{place} holds images for training: name those for evaluation with --data.eval_path")
        request.require_undivided(place)
        return _counted(_matching(*_split_pattern(place)))
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder at {folder}: check --data.path and --data.root")
    listed = _read_info(folder)
    if request.name is not None and request.name.endswith(".tar"):
        return _counted(_matching(folder, request.name))
    for name in request.candidates():
        if name in listed:
            return _listed_shards(folder, name, *listed[name])
        for ending in ("/*.tar", "-*.tar", "_*.tar", ".tar"):
            if found := _found(folder, glob.escape(name) + ending):
                return _counted(found)
    shards = _found(folder, "*.tar")
    splits = sorted({*listed, *_splits_of_names(folder, shards)})
    if splits or not shards or not is_alone:
        raise ValueError(f"{request.missing(str(folder), splits)}, or name shards as wds/FOLDER/NAME-{{000..099}}.tar")
    request.require_undivided(place)
    return _counted(shards)


def _split_pattern(place: str) -> tuple[Path, str]:
    """Return the folder of a brace pattern, up to the first brace, and the rest of it."""
    parts = PurePath(place).parts
    plain = next((index for index, part in enumerate(parts) if "{" in part), len(parts) - 1)
    return Path(*parts[:plain]), str(PurePath(*parts[plain:]))


def _matching(folder: Path, pattern: str) -> list[str]:
    """Return the shards in a folder that a brace pattern names."""
    from braceexpand import UnbalancedBracesError, braceexpand  # type: ignore[attr-defined]

    if (folder / pattern).is_file():
        return [_shard(folder, pattern)]
    try:
        # One after the other: the first that is missing ends a pattern of billions.
        return [_shard(folder, name) for name in braceexpand(pattern)]
    except UnbalancedBracesError as error:
        raise ValueError(f"{pattern} has a brace without its partner: write NAME-{{000..099}}.tar") from error


def _found(folder: Path, pattern: str) -> list[str]:
    """Return the shards in a folder that match a glob pattern of ours."""
    return [_shard(folder, str(file.relative_to(folder))) for file in sorted(folder.glob(pattern))]


def _shard(folder: Path, name: str) -> str:
    """Return the path of a shard in a folder.

    Raises:
        OSError: There is no such file, or it is not a regular one.
        ValueError: The name is not that of a file in the folder.
    """
    parts = PurePath(name).parts
    if not parts or PurePath(name).is_absolute() or ".." in parts or any(map(SCHEME.match, parts)):
        raise ValueError(
            f"{folder} names a shard {name!r}, which is not a plain name of a file in the folder: rename or remove it"
        )
    path = folder / name
    if not path.exists():
        raise FileNotFoundError(f"no shard at {path}: check --data.path and the numbers in its braces")
    if not is_inside(path, folder):
        raise ValueError(f"{path} is a link to a place outside of {folder}: copy the file into the folder")
    # Refuses what is not a regular file.
    open_regular(path).close()
    return str(path)


def _splits_of_names(folder: Path, shards: Sequence[str]) -> set[str]:
    """Return the splits in the names of folders and shards: val of val-000.tar and of val/000.tar."""
    by_folder = {file.parent.name for file in folder.glob("*/*.tar")}
    stems = {re.sub(r"[-_.]?\d+$", "", Path(shard).stem) for shard in shards}
    # Shards may have any name: only known words show that they are of different splits.
    divided = any(set(re.split(r"[-_.]", stem.lower())) & _SPLIT_WORDS for stem in stems)
    return by_folder | {stem for stem in stems if stem and divided}


_SPLIT_WORDS = {word for name in ("train", "validation", "test") for word in spellings(name)}


def _read_info(folder: Path) -> dict[str, tuple[list[str], list[Any]]]:
    """Read the names and lengths of shards by split from timm's file; empty if there is no such file."""
    file = next((folder / name for name in INFO_NAMES if (folder / name).exists()), None)
    if file is None:
        return {}
    try:
        content = read_json(file)
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON ({error}): correct or remove it") from error
    splits: Any = content.get("splits") if isinstance(content, dict) else None
    if not has_type(splits, dict[str, dict[str, Any]]):
        raise ValueError(f"{file} has no record of splits: correct or remove it")
    found = {name: (split.get("filenames"), split.get("shard_lengths")) for name, split in splits.items()}
    for name, (names, lengths) in found.items():
        if not has_type(names, list[str]) or not has_type(lengths, list[Any]) or len(names) != len(lengths):
            raise ValueError(
                f"{file} should list as many filenames as shard_lengths for its split {name!r}: correct or remove it"
            )
    return found


def _listed_shards(folder: Path, split: str, names: Sequence[str], lengths: Sequence[Any]) -> ShardSource:
    """Return the shards of a split, as the folder's file lists them."""
    shards = [_shard(folder, shard) for shard in names]
    for shard, length in zip(shards, lengths, strict=True):
        # An image takes a header and a block of content at least.
        most = Path(shard).stat().st_size // (2 * tarfile.BLOCKSIZE)
        if not has_type(length, int) or not 0 <= length <= most:
            raise ValueError(
                f"{INFO_NAMES[0]} gives {length!r:.50} images for {shard} of its split {split!r}, which is not a whole "
                f"number from 0 to {most}, as many as the file can hold: correct or remove it"
            )
    return ShardSource(shards, list(lengths))


def _counted(shards: list[str]) -> ShardSource:
    """Return shards whose lengths are found by reading the names in them."""
    lengths = []
    for shard in shards:
        with open_regular(shard) as stream:
            samples = (files for _, files in _grouped(stream, shard))
            lengths.append(sum(any(key in IMAGE_KEYS for key, _ in files) for files in samples))
    return ShardSource(shards, lengths)


def list_files(file: Path) -> list[tarfile.TarInfo]:
    """Return all but the folders in a tar file that is not compressed.

    Raises:
        OSError: It cannot be opened, or it is not a regular file.
        ValueError: It is damaged or compressed.
    """
    with open_regular(file) as stream:
        return list(_members(stream, str(file)))


def is_plain_file(item: tarfile.TarInfo) -> bool:
    """Whether something in a tar file is a regular file that is not sparse."""
    return item.isreg() and not item.issparse()


def _members(stream: BinaryIO, name: str) -> Iterator[tarfile.TarInfo]:
    """Yield all but the folders in a tar file, in their order; `name` is for messages."""
    size = stream.seek(0, io.SEEK_END)
    stream.seek(0)
    try:
        with tarfile.open(fileobj=stream, mode="r:") as archive:
            for item in archive:
                if item.offset_data + (item.size if is_plain_file(item) else 0) > size:
                    raise tarfile.ReadError("unexpected end of data")
                if not item.isdir():
                    yield item
            # Python takes a header that is damaged or cut off for the end, which is a block of zeros.
            stream.seek(archive.offset)
            last = stream.read(tarfile.BLOCKSIZE)
            if last not in (b"", bytes(tarfile.BLOCKSIZE)):
                raise tarfile.ReadError("a damaged header")
    except TAR_ERRORS as error:
        raise ValueError(
            f"{name} is damaged or no plain tar file ({' '.join(str(error).split())[:200] or type(error).__name__}): "
            "copy it again, or pack it without compression"
        ) from error


def _grouped(stream: BinaryIO, name: str) -> Iterator[tuple[str, Iterator[tuple[str, tarfile.TarInfo]]]]:
    """Yield the samples of a shard: the name that files have in common, and these files by extension."""
    from webdataset.tariterators import base_plus_ext

    named = ((*base_plus_ext(item.name), item) for item in _members(stream, name))
    for key, files in groupby((each for each in named if each[0] is not None), key=itemgetter(0)):
        yield key, ((extension.lower(), item) for _, extension, item in files)


def _samples(stream: BinaryIO, name: str) -> Iterator[dict[str, Any]]:
    """Yield the samples of a shard called `name`: __key__, __url__, and contents by extension."""
    for key, files in _grouped(stream, name):
        sample: dict[str, Any] = {"__key__": key, "__url__": name}
        for extension, item in files:
            if extension in sample:
                raise ValueError(f"{name} has two files called {key}.{extension}: pack it again, with one of them")
            if extension in IMAGE_KEYS or extension == LABEL_KEY:
                sample[extension] = _content(stream, item)
        yield sample


def _content(stream: BinaryIO, item: tarfile.TarInfo) -> bytes:
    """Return the content of a file in a tar file; a link or the like has none, hence cannot be used."""
    if not is_plain_file(item):
        return b""
    position = stream.tell()
    stream.seek(item.offset_data)
    content = stream.read(item.size)
    stream.seek(position)
    return content
