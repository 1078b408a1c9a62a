"""Image files: which ones are meant, what they are called, and how they are opened and decoded."""

import glob
import os
import re
import struct
import warnings
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import BinaryIO

from PIL import Image, UnidentifiedImageError
from PIL.ImageFile import ImageFile

from ..utils.files import NotRegularFileError, open_regular
from ..utils.memory import require_memory
from .band_files import SEVERAL_PAGES, DeepPng, TiffBands, has_more_pages, is_beyond_pillow
from .pixels import ORIENTATION, AnyImage, BandArray, PixelFormat, convert_pixels, transposed

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
# Images with fewer pixels fit into memory.
PIXELS_WITHOUT_CHECK = 2**26


def has_valid_size(size: tuple[int, int]) -> bool:
    """Whether an image of this width and height is neither too small nor too elongated to show anything."""
    short, long = sorted(size)
    return short >= SMALLEST_SIDE and long <= LONGEST_TO_SHORTEST * short


def open_image(file: str | os.PathLike[str] | BinaryIO) -> ImageFile | BandArray:
    """Open an image of one of FORMATS, whatever the name of its file says; it is not decoded yet.

    All images that are not made by this library are opened here: no other program is started for them, and only regular
    files are read.

    Returns:
        An image of Pillow's; a BandArray for files with bands or bits that Pillow would leave out.

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


def _identify(stream: BinaryIO) -> ImageFile | BandArray:
    try:
        image = Image.open(stream, formats=supported_formats())
    except UnidentifiedImageError as error:
        stream.seek(0)
        name = _format_by_prefix(stream.read(_PREFIX))
        if name is None:
            raise
        if name == "TIFF":
            return _open_bands(stream)
        if name in FORMATS:
            problem = f"it is a {name} file that is damaged or has a pixel type that is not supported: save it again"
        else:
            supported = ", ".join(supported_formats())
            problem = f"its format is {name}, which is not supported: convert it to one of {supported}"
        raise ValueError(problem) from error
    if image.format == "PNG" and is_beyond_pillow(image):
        return DeepPng(stream, image)
    if image.format == "TIFF":
        if is_beyond_pillow(image):
            return _open_bands(stream)
        if has_more_pages(image):
            warnings.warn(SEVERAL_PAGES, stacklevel=2)
    return image


def _open_bands(stream: BinaryIO) -> TiffBands:
    image = TiffBands(stream)
    if image.has_more_pages():
        warnings.warn(SEVERAL_PAGES, stacklevel=2)
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


def decode_image(image: AnyImage, pixel_format: PixelFormat) -> AnyImage:
    """Decode an image, convert it to the input of a model, and rotate it as its EXIF data say.

    Args:
        image: An image as `open_image` returns it, one of Pillow's, or a BandArray.
        pixel_format: The bands and values that the model gets.

    Returns:
        A PIL image in RGB or L for three channels or one; else a BandArray of bytes.

    Raises:
        OSError: It cannot be decoded.
        ValueError: It is too small or too long to show anything, it has other bands than the model needs, or it is not
            clear what its values mean.
    """
    check_size(image)
    converted = convert_pixels(image, pixel_format)
    # Some formats have their EXIF data behind the pixels.
    orientation = image.getexif().get(ORIENTATION, 1) if isinstance(image, Image.Image) else image.orientation
    return transposed(converted, orientation)


def check_size(image: AnyImage) -> None:
    """Refuse an image that is too small or too long to show anything, or that does not fit into memory."""
    width, height = image.size
    if not has_valid_size((width, height)):
        raise ValueError(
            f"it has {width} × {height} pixels, which show nothing: at least {SMALLEST_SIDE} are needed on "
            f"the shorter side, and at most {LONGEST_TO_SHORTEST} times as many on the longer one"
        )
    if width * height > PIXELS_WITHOUT_CHECK:
        needed = width * height * len(image.getbands())
        require_memory(needed, f"its {width} × {height} pixels", "cut it into tiles")


@contextmanager
def decompression_bomb_limit(most_pixels: int | None = None) -> Iterator[None]:
    """Raise an error where Pillow only warns of a decompression bomb: above this number; None = Pillow's limit."""
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
    if isinstance(error, Image.DecompressionBombWarning | Image.DecompressionBombError):
        # Pillow raises errors of its own at twice the limit.
        reason = _describe_limit(reason, 2 if isinstance(error, Image.DecompressionBombError) else 1)
    elif isinstance(error, UnidentifiedImageError):
        reason = "it is not an image"
    elif isinstance(error, NotRegularFileError):
        reason = f"it is {error.kind}, not a regular file"
    return f"{name} cannot be used ({reason or type(error).__name__})"


def _describe_limit(message: str, factor: int) -> str:
    """Describe that an image has too many pixels, from Pillow's message with a multiple of the limit."""
    pixels, limit = ([int(number) for number in re.findall(r"\d+", message)] + [0, 0])[:2]
    limit //= factor
    return (
        f"it has {pixels} pixels, more than the limit of {limit} against decompression bombs: if you trust it, allow "
        f"more with --max-pixels {pixels}, or cut it into tiles; `inlinevit segment predict` processes large images in "
        "windows"
    )


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

    def open(self, index: int) -> AbstractContextManager[AnyImage]:
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
