"""`inlinevit.stream`: images of any size and any kind through a model."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..streaming import ImageSource, MapSink
from ..streaming import stream as stream_source
from ..streaming.decoders import SegmentationNetwork
from ..utils.validation import require
from .image_source import RegionInput, RegionSource, choose_box, choose_level, name_of, open_regions
from .map_files import Coordinates, feature_sink
from .pixels import PixelFormat, PixelRange
from .regions import readable
from .token_masks import make_token_mask


@runtime_checkable
class StreamPredictor(Protocol):
    """A model that is ready to use, such as inlinevit.load returns for classification and segmentation."""

    @property
    def model(self) -> nn.Module:
        """The model."""
        ...

    @property
    def pixel_format(self) -> PixelFormat:
        """The bands and values of images that the model gets."""
        ...

    @property
    def mean_std(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """What images are normalised by: mean and standard deviation by channel."""
        ...

    @property
    def max_pixels(self) -> int | None:
        """The largest number of pixels that are decoded together."""
        ...


def stream(
    model: nn.Module | StreamPredictor,
    image: RegionInput | ImageSource,
    *,
    memory: str | int = "2GB",
    spill: str | Path | None = None,
    mask: Tensor | str | os.PathLike[str] | None = None,
    features: Mapping[str, MapSink | str | os.PathLike[str]] | None = None,
    chunk_rows: int | None = None,
    progress: Callable[[float], None] | None = None,
    resume: str | Path | None = None,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    level: int | None = None,
    mpp: float | None = None,
    region: Sequence[int] | None = None,
    bands: Sequence[int] | None = None,
    range: PixelRange = "auto",
    max_pixels: int | None = None,
) -> Tensor:
    """Compute a model for one image of any size in bounded memory: the result of the plain forward pass.

    See `inlinevit.streaming.stream` for how it is computed, and what memory and masks mean.

    Args:
        model: A model of inlinevit in evaluation mode, float32 on the CPU; also one of `optimize_for_inference`. A
            segmentation model of `inlinevit.tasks.segmentation`. Or a predictor of `inlinevit.load`, which knows the
            bands and the normalisation of its images.
        image: A normalised tensor (1, channels, height, width), or an ImageSource: rows of normalised pixels. Or an
            image, which is normalised as the model expects it, and not resized: a path (TIFF, Zarr, .npy, slides, and
            what Pillow decodes), an object of openslide, tiffslide or cucim, a PIL image, an array (height, width,
            bands) or a tensor (bands, height, width). Segmentation models take images with their predictor only.
        memory: Bytes that streaming may use, such as "2GB"; weights, and a row of the image's tiles, are not included.
        spill: A folder for tokens that do not fit into memory. By default, they have to fit.
        mask: Which pixels, or tokens of the first stage, count, (height, width); or, of an image, "tissue", "nodata" or
            a file.
        features: Where maps go while they are computed, by name, such as "stages.1", "stages.0.blocks.3" or "norm", and
            "logits" of a segmentation model: a sink or, of an image, the path of a .npy or .zarr file.
        chunk_rows: Rows of tokens per chunk; by default as many as the memory allows and are useful.
        progress: Called with the fraction of the work that is done, from 0 to 1.
        resume: A folder for the state of this run, from which the same call continues after an interruption.
        group: Processes that share the image, such as `torch.distributed.group.WORLD`: each of them calls this function
            with the same arguments, and computes some rows. Maps go to the sinks or files of the first one.
        level: The level of the image to read; 0 is the full resolution.
        mpp: Its resolution in micrometres per pixel, in place of the level.
        region: The part to read, (x, y, width, height) in pixels of level 0.
        bands: Which bands the model gets; see docs/images.md.
        range: Which values become black and white; see docs/images.md.
        max_pixels: The largest number of pixels that are decoded together.

    Returns:
        What `model(image)` returns: logits (1, classes), or (1, classes, height, width) of a segmentation model. If
        the latter go to a sink, an empty tensor (1, classes, 0, 0).
    """
    predictor = None if isinstance(model, nn.Module) else model
    if predictor is not None:
        require(
            isinstance(predictor, StreamPredictor) and isinstance(predictor.model, nn.Module),
            f"{type(predictor).__name__} cannot be streamed: give a model for classification or segmentation, or its "
            "predictor",
        )
        model = predictor.model
    assert isinstance(model, nn.Module)
    common: dict[str, Any] = {"memory": memory, "spill": spill, "chunk_rows": chunk_rows, "progress": progress}
    common |= {"resume": resume, "group": group}
    if (isinstance(image, Tensor) and image.dim() == 4) or isinstance(image, ImageSource):
        given = {"level": level, "mpp": mpp, "region": region, "bands": bands, "max_pixels": max_pixels}
        unused = [name for name, value in given.items() if value is not None] + ["range"] * (range != "auto")
        require(not unused, f"{' and '.join(unused)} do not apply to normalised pixels: leave that out")
        for name, value in {"mask": mask, **(features or {})}.items():
            is_path = isinstance(value, str | os.PathLike)
            require(
                not is_path, f"{name} is a path, which needs an image: give a tensor or a sink for normalised pixels"
            )
        return stream_source(model, image, mask=mask, features=features, **common)  # type: ignore[arg-type]
    if predictor is None:
        pixel_format, (mean, std) = _pixels_of(model)
    else:
        pixel_format, (mean, std) = predictor.pixel_format, predictor.mean_std
        max_pixels = predictor.max_pixels if max_pixels is None else max_pixels
    pixel_format = replace(
        pixel_format,
        bands=pixel_format.bands if bands is None else tuple(bands),
        range=pixel_format.range if range == "auto" else range,
    )
    name = name_of(image)
    with open_regions(image, max_pixels) as reader:
        with readable(name):
            chosen, _ = choose_level(reader, level, mpp)
            box = choose_box(reader, chosen, region)
        source = RegionSource(reader, pixel_format, mean, std, level=chosen, box=box, name=name)
        if isinstance(mask, str | os.PathLike):
            # Decoders of segmentation models take maps from stride 4 on.
            stride = 4 if isinstance(model, SegmentationNetwork) else int(getattr(model, "reductions", [1])[0])
            mask = torch.from_numpy(make_token_mask(mask, source, stride, max_pixels))
        where = Coordinates.of(source)
        sinks = {
            key: feature_sink(Path(value), where) if isinstance(value, str | os.PathLike) else value
            for key, value in (features or {}).items()
        }
        return stream_source(model, source, mask=mask, features=sinks, **common)


def _pixels_of(model: nn.Module) -> tuple[PixelFormat, tuple[tuple[float, ...], tuple[float, ...]]]:
    """Return the pixels that a model gets, and their mean and standard deviation, as its configuration has them."""
    require(
        not isinstance(model, SegmentationNetwork),
        "a segmentation model does not know how its images are normalised: give a normalised tensor, or the predictor "
        "that inlinevit.load returns in place of the model",
    )
    config: Any = getattr(model, "pretrained_cfg", None) or {}
    channels = int(getattr(model, "in_chans", 3))
    mean, std = (tuple(config.get(name) or (0.5,) * channels) for name in ("mean", "std"))
    require(
        len(mean) == channels == len(std),
        f"the model takes {channels} channels, but its mean and std are known for {len(mean)}: give a normalised "
        "tensor",
    )
    return PixelFormat(channels), (mean, std)
