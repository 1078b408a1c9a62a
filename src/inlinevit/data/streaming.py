"""`inlinevit.stream`: images of any size and any kind through a model."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..streaming import ImageSource, MapSink
from ..streaming import stream as stream_source
from ..utils.validation import require
from .image_source import RegionInput, RegionSource, choose_box, choose_level, name_of, open_regions
from .map_files import Coordinates, feature_sink
from .pixels import PixelFormat, PixelRange
from .regions import readable
from .token_masks import make_token_mask


def stream(
    model: nn.Module,
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
        model: A model of inlinevit in evaluation mode, float32 on the CPU; also one of `optimize_for_inference`.
        image: A normalised tensor (1, channels, height, width), or an ImageSource: rows of normalised pixels. Or an
            image, which is normalised as the model expects it, and not resized: a path (TIFF, Zarr, .npy, slides, and
            what Pillow decodes), an object of openslide, tiffslide or cucim, a PIL image, an array (height, width,
            bands) or a tensor (bands, height, width).
        memory: Bytes that streaming may use, such as "2GB"; weights, and a row of the image's tiles, are not included.
        spill: A folder for tokens that do not fit into memory. By default, they have to fit.
        mask: Which pixels, or tokens of the first stage, count, (height, width); or, of an image, "tissue", "nodata" or
            a file.
        features: Where maps go while they are computed, by name, such as "stages.1", "stages.0.blocks.3" or "norm": a
            sink or, of an image, the path of a .npy or .zarr file.
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
        What `model(image)` returns: logits (1, classes).
    """
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
    config: Any = getattr(model, "pretrained_cfg", None) or {}
    channels = int(getattr(model, "in_chans", 3))
    mean, std = (tuple(config.get(name) or (0.5,) * channels) for name in ("mean", "std"))
    require(
        len(mean) == channels == len(std),
        f"the model takes {channels} channels, but its mean and std are known for {len(mean)}: give a normalised "
        "tensor",
    )
    name = name_of(image)
    with open_regions(image, max_pixels) as reader:
        with readable(name):
            chosen, _ = choose_level(reader, level, mpp)
            box = choose_box(reader, chosen, region)
        pixel_format = PixelFormat(channels, None if bands is None else tuple(bands), range)
        source = RegionSource(reader, pixel_format, mean, std, level=chosen, box=box, name=name)
        if isinstance(mask, str | os.PathLike):
            stride = int(getattr(model, "reductions", [1])[0])
            mask = torch.from_numpy(make_token_mask(mask, source, stride, max_pixels))
        where = Coordinates.of(source)
        sinks = {
            key: feature_sink(Path(value), where) if isinstance(value, str | os.PathLike) else value
            for key, value in (features or {}).items()
        }
        return stream_source(model, source, mask=mask, features=sinks, **common)
