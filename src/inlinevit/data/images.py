"""Image files: which ones are meant, what they are called, and how they are opened and decoded."""

import glob
import os
import struct
import warnings
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError
from PIL.ImageFile import ImageFile
from PIL.TiffImagePlugin import BITSPERSAMPLE, PHOTOMETRIC_INTERPRETATION

from ..utils.files import NotRegularFileError, open_regular

# The formats that are read: those that Pillow decodes by itself. Not among them are EPS (Pillow starts Ghostscript),
# WMF (drawn by the operating system), IPTC (opens the image inside as any format, hence as EPS), formats that other
# software decodes (BUFR, GRIB, HDF5, FPX, MIC, MPEG), and those of documents, brushes and old systems. Multi-picture
# JPEG files (MPO) are opened as JPEG.
FORMATS = (
    "JPEG", "PNG", "WEBP", "TIFF", "BMP", "DIB", "GIF", "PPM",
    "AVIF", "JPEG2000", "QOI", "ICO", "DDS", "PCX", "SGI", "TGA",
)  # fmt: skip
# Bytes that identify a format.
_PREFIX = 16

# Images with fewer pixels on a side show nothing; longer strips would be blown up to billions of pixels.
SMALLEST_SIDE = 2
LONGEST_TO_SHORTEST = 100


def has_valid_size(size: tuple[int, int]) -> bool:
    """Whether an image of this width and height is neither too small nor too elongated to show anything."""
    short, long = sorted(size)
    return short >= SMALLEST_SIDE and long <= LONGEST_TO_SHORTEST * short


def open_image(file: str | os.PathLike[str] | BinaryIO) -> ImageFile:
    """Open an image of one of FORMATS, whatever the name of its file says; it is not decoded yet.

    All images that are not made by this library are opened here: no other program is started for them, and only regular
    files are read.

    Raises:
        NotRegularFileError: It is a pipe, a device, a socket or a folder.
        OSError: The file cannot be opened, or it is not an image (UnidentifiedImageError).
        ValueError: It has a format or a pixel type that is not supported.
    """
    if not isinstance(file, str | os.PathLike):
        return _identify(file)
    stream = open_regular(file)
    try:
        image = _identify(stream)
    except BaseException:
        stream.close()
        raise
    # Pillow closes only files that it has opened itself.
    weakref.finalize(image, stream.close)
    return image


def _identify(stream: BinaryIO) -> ImageFile:
    try:
        image = Image.open(stream, formats=supported_formats())
    except UnidentifiedImageError as error:
        stream.seek(0)
        name = _format_by_prefix(stream.read(_PREFIX))
        if name is None:
            raise
        if name in FORMATS:
            problem = f"it is a {name} file that is damaged or has a pixel type that is not supported: save it again"
        else:
            supported = ", ".join(supported_formats())
            problem = f"its format is {name}, which is not supported: convert it to one of {supported}"
        raise ValueError(problem) from error
    return image


def supported_formats() -> tuple[str, ...]:
    """Return those of FORMATS that the installed Pillow can read: it may be built without AVIF or JPEG 2000."""
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def _format_by_prefix(prefix: bytes) -> str | None:
    """Return the format that the first bytes of a file indicate, if Pillow knows it."""
    for name, (_, accepts) in Image.OPEN.items():
        try:
            if accepts is not None and accepts(prefix) is True:
                return name
        except (struct.error, IndexError):
            # The file is shorter than the beginning that this format has.
            continue
    return None


def decode_image(image: Image.Image, mode: str) -> Image.Image:
    """Decode an image, rotate it as its EXIF data say, and convert it to a mode.

    Raises:
        OSError: It cannot be decoded.
        ValueError: It is too small or too long to show anything, or it is not clear what its values mean.
    """
    if not has_valid_size(image.size):
        raise ValueError(
            f"it has {image.width} × {image.height} pixels, which show nothing: at least {SMALLEST_SIDE} are needed on "
            f"the shorter side, and at most {LONGEST_TO_SHORTEST} times as many on the longer one"
        )
    return convert_mode(ImageOps.exif_transpose(image), mode, stored=image)


def convert_mode(image: Image.Image, mode: str, *, stored: Image.Image | None = None) -> Image.Image:
    """Decode an image and convert it to a mode, without rotation. docs/training.md has a table of all modes.

    Args:
        image: Any image of Pillow's.
        mode: RGB, or L for grey.
        stored: The image as it was opened, if `image` is a rotated copy: what values mean depends on the file.

    Raises:
        OSError: It cannot be decoded.
        ValueError: It is not clear what its values mean, or it has colours that cannot be converted.
    """
    if image.mode == "F":
        return _from_floats(image, stored or image).convert(mode)
    if image.mode == "I" or image.mode.startswith("I;16"):
        steps = _steps_of_a_byte(stored or image)
        return image.convert("I").point(lambda value: value / steps).convert("L").convert(mode)
    if image.mode == "LAB":
        # Pillow converts it to RGB only.
        image = image.convert("RGB")
    return image.convert(mode)


def _steps_of_a_byte(image: Image.Image) -> int:
    """Return how many values of an integer image with more than 8 bits make one step of 8 bits."""
    _refuse_inverted(image)
    # In these two formats Pillow's 32 bits hold 16: in PNG as older versions open it, in PGM always.
    if image.mode == "I" and image.format not in ("PNG", "PPM"):
        raise ValueError(
            "its pixels are integers of 32 bits or with a sign, which do not tell what is white: save it with 8 or 16 "
            "bits without a sign"
        )
    return 16 if _tiff_tag(image, BITSPERSAMPLE) == (12,) else 256


def _from_floats(image: Image.Image, stored: Image.Image) -> Image.Image:
    """Convert an image of floating-point numbers from 0 (black) to 1 (white) to 8 bits."""
    _refuse_inverted(stored)
    return Image.fromarray(bytes_from_floats(np.asarray(image)))


def bytes_from_floats(values: NDArray[Any]) -> NDArray[np.uint8]:
    """Return pixels from 0 to 1 as bytes; others are refused."""
    # NaN fails both comparisons.
    if not (values.min() >= 0 and values.max() <= 1):
        raise ValueError(
            f"its pixels are floating-point numbers from {values.min():g} to {values.max():g}, which do not tell what "
            "is black and white: scale them to 0 … 1, or save it with 8 or 16 bits"
        )
    return (values * 255 + 0.5).astype(np.uint8)


def _refuse_inverted(image: Image.Image) -> None:
    """Refuse TIFF files in which 0 is white: Pillow inverts them with 8 bits, but not with more."""
    if _tiff_tag(image, PHOTOMETRIC_INTERPRETATION) == 0:
        raise ValueError("0 is white in it, which is supported for 8 bits only: save it with 0 for black")


def _tiff_tag(image: Image.Image, tag: int) -> object:
    """Return a tag of a TIFF file; None if it does not have it, or for another format."""
    return getattr(image, "tag_v2", {}).get(tag)


@contextmanager
def decompression_bomb_limit(most_pixels: int | None = None) -> Iterator[None]:
    """Raise an error where Pillow only warns of a decompression bomb; None = Pillow's limit."""
    before = Image.MAX_IMAGE_PIXELS
    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            Image.MAX_IMAGE_PIXELS = most_pixels or before
            yield
        finally:
            Image.MAX_IMAGE_PIXELS = before


def describe_image_error(name: str, error: Exception) -> str:
    """Describe why an image cannot be used; a broken file can make Pillow raise any error."""
    reason = str(error)
    if isinstance(error, UnidentifiedImageError):
        reason = "it is not an image"
    elif isinstance(error, NotRegularFileError):
        reason = f"it is {error.kind}, not a regular file"
    return f"{name} cannot be used ({reason or type(error).__name__})"


class ImageFiles:
    """Images in files that a user has named, as files, folders or glob patterns."""

    def __init__(self, arguments: Iterable[str]) -> None:
        self.files = list(find_images(arguments).items())

    def __len__(self) -> int:
        return len(self.files)

    def subset(self, indices: Iterable[int]) -> "ImageFiles":
        """Return some of the images, in this order."""
        chosen = ImageFiles([])
        chosen.files = [self.files[index] for index in indices]
        return chosen

    def open(self, index: int) -> AbstractContextManager[Image.Image]:
        """Open an image without decoding it; any error means that it cannot be used."""
        path, problem = self.files[index]
        if problem:
            raise ValueError(problem)
        return open_image(path)

    def name(self, index: int) -> str:
        """Return the name of an image in messages and results."""
        return display_name(self.files[index][0])


def find_images(arguments: Iterable[str]) -> dict[str, str]:
    """Find the files that are meant by names, folders and glob patterns, each once.

    Of a folder, the files at any depth whose extensions are those of images are taken, in the order of their names.

    Returns:
        Paths, each with what is wrong with it ("" = nothing so far).
    """
    files: dict[str, str] = {}
    seen: set[str] = set()
    for argument in arguments:
        for path, problem in expand_argument(argument):
            place = os.path.abspath(path)
            if place not in seen:
                seen.add(place)
                files[path] = problem
    return files


def is_pattern(argument: str) -> bool:
    """Whether an argument is a glob pattern, and not the name of a file or a folder."""
    return glob.has_magic(argument) and not os.path.exists(argument)


def expand_argument(argument: str) -> Iterator[tuple[str, str]]:
    """Yield the files that one argument means, each with what is wrong with it."""
    matches = sorted(glob.glob(argument, recursive=True)) if is_pattern(argument) else [argument]
    if not matches:
        yield argument, "nothing matches this pattern"
    for match in matches:
        files = _images_in(match) if os.path.isdir(match) else [match]
        if not files:
            yield match, "the folder holds no images"
        for file in files:
            # Reading from a pipe or a device could last forever.
            problem = "it is not a regular file" if os.path.exists(file) else "there is no such file or folder"
            yield file, "" if os.path.isfile(file) else problem


def _images_in(folder: str) -> list[str]:
    extensions = image_extensions()
    files = (file for file in Path(folder).rglob("*") if file.suffix.lower() in extensions)
    return sorted(str(file) for file in files if not file.is_dir())


def image_extensions() -> frozenset[str]:
    """Return the extensions of image files in folders and archives: those of FORMATS, in lower case."""
    supported = supported_formats()
    extensions = {extension for extension, name in Image.registered_extensions().items() if name in supported}
    # Pillow has multi-picture files under a name of their own.
    return frozenset(extensions | {".mpo"})


def display_name(path: str) -> str:
    """Return the name of a file as text: bytes that are not valid text must not stop the output."""
    return os.fsencode(path).decode(errors="backslashreplace")


def unique_names(files: ImageFiles, folder: Path, endings: Sequence[str] = (".png",)) -> list[str]:
    """Return a name for the drawings of each image: names that clash get numbers, and no image is overwritten.

    Args:
        files: The images.
        folder: Where the drawings go.
        endings: What is appended to the name for each of the drawings.
    """
    home = Path(os.path.realpath(folder))
    # Some file systems do not distinguish A.png from a.png.
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


def printable(text: str) -> str:
    """Replace the characters of a text that could break a line or control a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
