"""Bands, ranges and normalisation of a run: from its config, and where that leaves them open, from training images."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from ..data.images import decode_image, decompression_bomb_limit
from ..data.pixels import AnyImage, PixelFormat, measure_bands, measure_bits
from ..engine.config import PixelConfig

Measured = TypeVar("Measured")
# What images are normalised by: mean and standard deviation by channel.
MeanStd = tuple[tuple[float, ...], tuple[float, ...]]

# Images from which ranges and means are found.
MOST_MEASURED = 32
# What images with another number of bands than one or three are normalised by, if nothing is known of them.
DEFAULT_MEAN, DEFAULT_STD = 0.5, 0.25


def make_pixel_format(data: PixelConfig, channels: int) -> PixelFormat:
    """Return which bands and values of images a model with this number of channels gets."""
    bands = None if data.bands is None else tuple(data.bands)
    pixel_range: Any = tuple(data.range) if isinstance(data.range, list | tuple) else data.range
    return PixelFormat(channels, bands, pixel_range)


def mean_std_of(
    data: PixelConfig | None, channels: int, made_for: Callable[[], tuple[Sequence[float], Sequence[float]]]
) -> MeanStd:
    """Return the mean and standard deviation of each channel.

    Args:
        data: Those of the run; None = there is no run.
        channels: Of the model.
        made_for: Returns those that the model was made for, of three channels.
    """
    if data is not None and data.mean is not None and data.std is not None:
        return tuple(data.mean), tuple(data.std)
    if channels == 3:
        mean, std = made_for()
        return tuple(mean), tuple(std)
    return (DEFAULT_MEAN,) * channels, (0.5 if channels == 1 else DEFAULT_STD,) * channels


def resolve_pixels(data: PixelConfig, channels: int, count: int, open_one: Callable[[int], AnyImage]) -> None:
    """Replace what a data config leaves open by what training images say, so that the run has it in its config.

    "auto" becomes the number of bits in use, if images have 16 bits. Mean and standard deviation of other numbers of
    channels than one and three are measured.

    Args:
        data: The data config of the run; it is changed.
        channels: Of the model.
        count: How many training images there are.
        open_one: Opens the image of an index.
    """
    problems: list[str] = []
    chosen = (
        [place * count // MOST_MEASURED for place in range(MOST_MEASURED)] if count > MOST_MEASURED else range(count)
    )

    def measured(measure: Callable[[AnyImage], Measured]) -> Iterator[Measured]:
        for index in chosen:
            try:
                with decompression_bomb_limit(data.max_pixels), open_one(index) as opened:
                    result = measure(opened)
            # A broken file can make Pillow raise anything. It is reported when it is its turn.
            except Exception as error:
                problems.append(str(error))
            else:
                yield result

    if data.range == "auto":
        found = measured(lambda image: measure_bits(image, make_pixel_format(data, channels)))
        bits = [some for some in found if some is not None]
        if bits:
            data.range = max(bits)
    if channels not in (1, 3) and data.mean is None:
        decoded = measured(lambda image: decode_image(image, make_pixel_format(data, channels)))
        try:
            data.mean, data.std = measure_bands(decoded)
        except ZeroDivisionError as error:
            reason = problems[0] if problems else "there are none"
            raise ValueError(f"the bands of training images cannot be measured, because {reason}") from error
