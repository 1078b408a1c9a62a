"""Files with bands or types that Pillow has no mode for: TIFF by tifffile, 16-bit colour PNG by imagecodecs."""

import math
import warnings
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, TiffImagePlugin
from PIL.ImageFile import ImageFile
from PIL.TiffImagePlugin import BITSPERSAMPLE, SAMPLEFORMAT, SAMPLESPERPIXEL

from ..utils.memory import require_memory
from .pixels import ALPHA_SAMPLES, GDAL_NODATA, ORIENTATION, SIGNED, ZERO_IS_WHITE, BandArray, parse_nodata, tiff_tag

# Files with more bands are damaged, or made to fill the memory.
MOST_BANDS = 1024
# TIFF's compressions that are decoded, by number: none, LZW, deflate (two numbers), PackBits, Zstandard.
COMPRESSIONS = (1, 5, 8, 32946, 32773, 50000)
# TIFF's photometric interpretations of plain bands and of RGB.
PLAIN, RGB = 1, 2
# Further pages with one of these flags are smaller copies or masks of the first.
COPY_OR_MASK = 0b101
NEW_SUBFILE_TYPE = 254
SEVERAL_PAGES = "a TIFF file has several pages: only the first is used"


def is_beyond_pillow(image: ImageFile) -> bool:
    """Whether Pillow would leave out bands or bits of an image that it has opened, but not yet decoded."""
    if image.format == "PNG":
        return image.mode in ("LA", "RGB", "RGBA") and any(";16" in str(tile[3]) for tile in image.tile)
    if image.format != "TIFF":
        return False
    bits, kinds = (tiff_tag(image, tag) or (1,) for tag in (BITSPERSAMPLE, SAMPLEFORMAT))
    samples = tiff_tag(image, SAMPLESPERPIXEL) or 1
    has_signed_bytes = max(bits) == 8 and SIGNED in kinds
    return samples > len(image.getbands()) or (samples > 1 and max(bits) > 8) or has_signed_bytes


def has_more_pages(image: Image.Image) -> bool:
    """Whether a TIFF file that Pillow has opened has other images than the first."""
    try:
        image.seek(1)
        has_another = not (tiff_tag(image, NEW_SUBFILE_TYPE) or 0) & COPY_OR_MASK
    # A damaged second page does not matter.
    except Exception:
        has_another = False
    image.seek(0)
    return has_another


def check_pixels(width: int, height: int) -> None:
    """Refuse an image with more pixels than Pillow's limit, as Pillow does."""
    limit = Image.MAX_IMAGE_PIXELS
    if limit is not None and width * height > limit:
        raise Image.DecompressionBombWarning(f"Image size ({width * height} pixels) exceeds limit of {limit} pixels")


class DeepPng(BandArray):
    """A PNG file with 16 bits per colour, of which Pillow would keep 8.

    Args:
        stream: The file.
        image: The same, as Pillow has opened it: for its size, which is checked, and its EXIF data.
    """

    format = "PNG"

    def __init__(self, stream: BinaryIO, image: ImageFile) -> None:
        super().__init__(None)
        self.stream, self.image = stream, image
        self.width, self.height = image.size
        self.dtype = np.dtype(np.uint16)
        # Pillow's own bands would be RGBA for grey with alpha.
        self.bands = 2 if "LA" in str(image.tile[0][3]) else len(image.getbands())
        self.has_alpha = self.bands in (2, 4)

    def read(self) -> NDArray[Any]:
        self.stream.seek(0)
        content = self.stream.read()
        self.orientation = self.image.getexif().get(ORIENTATION, 1)
        try:
            import imagecodecs
        except ImportError:
            return _decode_by_torchvision(content)
        return imagecodecs.png_decode(content)


def _decode_by_torchvision(content: bytes) -> NDArray[Any]:
    """Decode a PNG file; torchvision will lose its decoders one day."""
    try:
        from torchvision.io import ImageReadMode, decode_png
    except ImportError as error:
        raise ValueError(
            "it is a PNG file with 16 bits per colour, for which imagecodecs is needed: pip install 'inlinevit[tiff]'"
        ) from error
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        values = decode_png(torch.frombuffer(bytearray(content), dtype=torch.uint8), ImageReadMode.UNCHANGED)
    return values.permute(1, 2, 0).numpy()


class TiffBands(BandArray):
    """The first page of a TIFF file, by tifffile: any number of bands, any type. Geographic tags are not used.

    Raises:
        ValueError: tifffile is not installed, or the file is not supported.
    """

    format = "TIFF"

    def __init__(self, stream: BinaryIO) -> None:
        try:
            import tifffile
        except ImportError as error:
            raise ValueError(
                f"it is a TIFF file {_describe(stream)}, for which tifffile is needed: pip install 'inlinevit[tiff]'"
            ) from error
        super().__init__(None)
        stream.seek(0)
        try:
            self.file: Any = tifffile.TiffFile(stream, name="image.tif")
            pages: Any = self.file.pages
            self.page: Any = pages[0]
        # A damaged file can make tifffile raise anything.
        except Exception as error:
            raise ValueError(f"it is a TIFF file that is damaged ({error}): save it again") from error
        page: Any = pages[0]
        self.width, self.height, self.bands = page.imagewidth, page.imagelength, page.samplesperpixel
        check_pixels(self.width, self.height)
        # A tile may be larger than the image.
        check_pixels(math.prod(page.chunks[:2]), 1)
        if page.photometric == ZERO_IS_WHITE:
            raise ValueError("0 is white in it, which is supported for 8 bits only: save it with 0 for black")
        if page.photometric not in (PLAIN, RGB):
            name = page.photometric.name.lower()
            raise ValueError(f"its colours are {name} with {page.bitspersample} bits: convert it to RGB")
        if page.dtype is None or page.axes not in ("YX", "YXS", "SYX") or not 1 <= self.bands <= MOST_BANDS:
            raise ValueError(f"its pixels are {_describe(stream)}, which is not supported: save it with 8 or 16 bits")
        if page.compression not in COMPRESSIONS:
            raise ValueError(f"it is compressed as {page.compression.name}: save it with deflate or LZW")
        self.dtype = page.dtype
        self.is_rgb = page.photometric == RGB
        self.has_alpha = bool(page.extrasamples) and page.extrasamples[-1] in ALPHA_SAMPLES
        self.nodata = parse_nodata(page.tags.valueof(GDAL_NODATA))
        self.orientation = int(page.tags.valueof(ORIENTATION) or 1)

    def has_more_pages(self) -> bool:
        """Whether there are other images than the first."""
        try:
            return not int(self.file.pages[1].subfiletype) & COPY_OR_MASK
        # A damaged second page does not matter.
        except Exception:
            return False

    def read(self) -> NDArray[Any]:
        needed = self.width * self.height * self.bands * self.dtype.itemsize
        require_memory(needed, f"its {self.bands} bands of {self.width} × {self.height} pixels", "cut it into tiles")
        values = self.page.asarray(maxworkers=1)
        values = np.moveaxis(values, 0, -1) if self.page.axes == "SYX" else values
        return values.reshape(self.height, self.width, self.bands)

    def close(self) -> None:
        self.file.close()


def _describe(stream: BinaryIO) -> str:
    """Return the bands and bits of a TIFF file that Pillow cannot open."""
    try:
        stream.seek(0)
        header = stream.read(8)
        # BigTIFF has a longer one.
        tags = TiffImagePlugin.ImageFileDirectory_v2(header if header[2] == 42 else header + stream.read(8))
        stream.seek(tags.next)
        tags.load(stream)
        bits, count = tags.get(BITSPERSAMPLE, (1,)), tags.get(SAMPLESPERPIXEL, 1)
        kind = {2: "signed ", 3: "floating-point "}.get((tags.get(SAMPLEFORMAT) or (1,))[0], "")
        return f"of {count} {kind}band{'' if count == 1 else 's'} with {max(bits)} bits"
    # A damaged file can make Pillow raise anything.
    except Exception:
        return "that Pillow cannot read"
