"""Image files: which ones are meant, what they are called, and how they become images that a model can see."""

import glob
import io
import os
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from PIL import Image, ImageOps, UnidentifiedImageError
from PIL.ImageFile import StubImageFile

# Images with fewer pixels on a side show nothing; longer strips would be blown up to billions of pixels.
SMALLEST_SIDE = 2
LONGEST_TO_SHORTEST = 100


def shows_something(size: tuple[int, int]) -> bool:
    """Whether an image of so many pixels each way is neither too small nor too long to show anything."""
    short, long = sorted(size)
    return short >= SMALLEST_SIDE and long <= LONGEST_TO_SHORTEST * short


def upright(image: Image.Image, mode: str) -> Image.Image:
    """An image decoded, turned as its EXIF data say, in the colours that a model wants.

    Raises:
        OSError: It cannot be decoded.
        ValueError: It is too small or too long to show anything.
    """
    if not shows_something(image.size):
        raise ValueError(
            f"it has {image.width} × {image.height} pixels, which show nothing: at least {SMALLEST_SIDE} are needed on "
            f"the shorter side, and at most {LONGEST_TO_SHORTEST} times as many on the longer one"
        )
    return in_colours(ImageOps.exif_transpose(image), mode)


def in_colours(image: Image.Image, mode: str) -> Image.Image:
    """An image decoded, as it lies, in the colours that a model wants.

    Args:
        image: Any of Pillow's.
        mode: Pillow's word for the colours: RGB, or L for grey.

    Raises:
        OSError: It cannot be decoded.
    """
    if image.mode.startswith("I;16"):
        # Pillow would make all but the darkest of 16-bit pixels white.
        image = image.convert("I").point(lambda value: value / 256).convert("L")
    return image.convert(mode)


@contextmanager
def bombs_refused(most_pixels: int | None = None) -> Iterator[None]:
    """Have Pillow refuse images that are large, but not yet a danger to every machine: it only warns of them.

    Args:
        most_pixels: What is too many for whoever opens them; None = what Pillow thinks.
    """
    before = Image.MAX_IMAGE_PIXELS
    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            Image.MAX_IMAGE_PIXELS = most_pixels or before
            yield
        finally:
            Image.MAX_IMAGE_PIXELS = before


def why_unusable(name: str, error: Exception) -> str:
    """What to say of an image that cannot be used.

    Args:
        name: What it is called.
        error: What came of the attempt; a broken file can make Pillow raise anything.
    """
    reason = "it is no image" if isinstance(error, UnidentifiedImageError) else str(error)
    return f"{name} cannot be used ({reason or type(error).__name__})"


class ImageFiles:
    """Images in files that a user has named.

    Args:
        arguments: Files, folders, or glob patterns.
    """

    def __init__(self, arguments: Iterable[str]) -> None:
        self.files = list(find_images(arguments).items())

    def __len__(self) -> int:
        return len(self.files)

    def open(self, index: int) -> Image.Image:
        """An image, not yet decoded; any error means that it cannot be used."""
        path, problem = self.files[index]
        if problem:
            raise ValueError(problem)
        return Image.open(path)

    def name(self, index: int) -> str:
        """What an image is called in messages and results."""
        return readable_name(self.files[index][0])


def find_images(arguments: Iterable[str]) -> dict[str, str]:
    """The files that are meant by names, folders and glob patterns, each once.

    Of a folder, the files at any depth whose endings are those of images are taken, in the order of their names.

    Returns:
        Paths, each with what is wrong with it ("" = nothing so far).
    """
    files: dict[str, str] = {}
    seen: set[str] = set()
    for argument in arguments:
        for path, problem in _expand(argument):
            place = os.path.abspath(path)
            if place not in seen:
                seen.add(place)
                files[path] = problem
    return files


def _expand(argument: str) -> Iterator[tuple[str, str]]:
    """The files that one argument means, each with what is wrong with it."""
    if os.path.isdir(argument):
        yield from _images_in(argument)
    elif os.path.exists(argument) or not glob.has_magic(argument):
        yield argument, _what_is_wrong(argument)
    else:
        matches = sorted(glob.glob(argument, recursive=True))
        if not matches:
            yield argument, "nothing matches this pattern"
        for match in matches:
            if os.path.isdir(match):
                yield from _images_in(match)
            else:
                yield match, _what_is_wrong(match)


def _what_is_wrong(path: str) -> str:
    """Why a path should not be opened; "" if it can be."""
    if os.path.isfile(path):
        return ""
    # Reading from a pipe or a device could last for ever.
    return "it is no regular file" if os.path.exists(path) else "there is no such file or folder"


def _images_in(folder: str) -> Iterator[tuple[str, str]]:
    endings = image_endings()
    files = sorted(str(file) for file in Path(folder).rglob("*") if file.suffix.lower() in endings and file.is_file())
    if not files:
        yield folder, "the folder holds no images"
    for file in files:
        yield file, ""


def image_endings() -> set[str]:
    """The endings of the files that Pillow can read."""
    formats = Image.registered_extensions()
    return {ending for ending, name in formats.items() if name in Image.OPEN and not _is_stub(name)}


def _is_stub(name: str) -> bool:
    """Whether Pillow knows a format, but needs more software to read it."""
    reader = Image.OPEN[name][0]
    return isinstance(reader, type) and issubclass(reader, StubImageFile)


def readable_name(path: str) -> str:
    """The name of a file as text: bytes that are none must not stop the output."""
    return os.fsencode(path).decode(errors="backslashreplace")


def free_names(files: ImageFiles, folder: Path, endings: Sequence[str] = (".png",)) -> list[str]:
    """A name for the drawings of each image: names that clash get numbers, and no image is written over.

    Args:
        files: The images.
        folder: Where the drawings go.
        endings: What is put behind the name for each of the drawings.
    """
    home = Path(os.path.realpath(folder))
    # There are disks that take A.png for a.png.
    taken = {os.path.realpath(path).casefold() for path, _ in files.files}
    uses: Counter[str] = Counter()
    chosen = []
    for path, _ in files.files:
        stem = Path(path).stem
        places: set[str] = set()
        while not places or places & taken:
            uses[stem] += 1
            name = stem if uses[stem] == 1 else f"{stem}-{uses[stem]}"
            places = {str(home / f"{name}{ending}").casefold() for ending in endings}
        taken |= places
        chosen.append(name)
    return chosen


def show_any_letter() -> None:
    """Have names shown, even in letters that the user's terminal does not know."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def on_one_line(text: str) -> str:
    """A name or a message without what could break a line or steer a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
