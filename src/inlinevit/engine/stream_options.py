"""Options of commands that stream one image of any size: `inlinevit predict --stream`, `inlinevit features`."""

from dataclasses import dataclass, field, fields
from math import inf
from typing import ClassVar

from ..utils.validation import Range, check_fields, require
from .config import PixelOptions

MOST_LEVELS = 64
MOST_MINUTES = 60 * 24 * 365


@dataclass(kw_only=True)
class RegionOptions:
    """Which part of an image is read, and at which resolution."""

    level: int | None = None
    """Level of the image: 0 = full resolution, further levels are the smaller copies in the file; null = 0."""
    mpp: float | None = None
    """Resolution in micrometres per pixel, in place of level: the nearest level is read, which may differ by 10%."""
    region: str | None = None
    """Part of the image, X,Y,WIDTH,HEIGHT in pixels of level 0; null = all of it."""

    def __post_init__(self) -> None:
        check_fields(self, "", level=Range(0, MOST_LEVELS), mpp=Range(0, inf, above_least=True))
        require(self.level is None or self.mpp is None, "--level and --mpp both choose a level: give one of them")
        self.parse_region()

    def parse_region(self) -> tuple[int, int, int, int] | None:
        """Return the region as numbers."""
        if self.region is None:
            return None
        try:
            x, y, width, height = (int(part) for part in self.region.split(","))
        except ValueError as error:
            raise ValueError(f"--region is {self.region}: it should be X,Y,WIDTH,HEIGHT, four whole numbers") from error
        return x, y, width, height


@dataclass(kw_only=True)
class StreamOptions(RegionOptions):
    """How one image is streamed."""

    # Options that have no effect without `stream`.
    needs_stream: ClassVar[tuple[str, ...]] = ("memory", "spill", "state", "mask", "timeout_minutes")

    stream: bool = False
    """Process one image of any size as a whole, by rows, in bounded memory; it is not resized."""
    memory: str = "2GB"
    """Memory for tokens, such as 2GB or 500MB, of each process; weights are not included."""
    spill: str | None = None
    """Folder for tokens that do not fit into memory; they are removed however the command ends. null = refuse such
    images."""
    state: str | None = None
    """Folder for the state of the job: after a kill, the same command continues from its last layer. It is removed at
    the end. null = start over. Not with several processes."""
    mask: str | None = None
    """Which parts of the image count: a file (PNG, TIFF, .npy; 0 = background) of the whole image at any lower
    resolution; tissue = where colours are saturated; nodata = pixels with data; null = all."""
    timeout_minutes: float = 30.0
    """How long the processes of torchrun, which share the image, wait for each other."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, "", timeout_minutes=Range(0, MOST_MINUTES, above_least=True))
        if not self.stream:
            defaults = {one.name: one.default for one in fields(self)}
            given = [name for name in self.needs_stream if vars(self)[name] != defaults[name]]
            require(
                not given, f"--{' and --'.join(given)} apply to streamed images only: add --stream, or leave it out"
            )


@dataclass(kw_only=True)
class StreamPredictOptions(StreamOptions):
    """How `predict` streams one image."""

    needs_stream: ClassVar[tuple[str, ...]] = (
        *StreamOptions.needs_stream,
        *("level", "mpp", "region", "head", "probabilities"),
    )

    head: str | None = None
    """Safetensors file of a linear layer, weight (classes, channels) and bias (classes): predict the class of each
    token of the last map, and write them to --output, a .tif file, in place of classes of the image."""
    probabilities: str | None = None
    """With head: a second .tif file, for the probability of each class."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.head is not None or self.probabilities is None,
            "--probabilities are those of a --head: give both, or leave it out",
        )


@dataclass(kw_only=True)
class LabelStreamOptions(StreamOptions):
    """How `segment predict` streams one image."""

    needs_stream: ClassVar[tuple[str, ...]] = (
        *StreamOptions.needs_stream,
        *("level", "mpp", "region", "probabilities"),
    )

    probabilities: str | None = None
    """A second .tif file, for the probability of each class."""


@dataclass(kw_only=True)
class FeaturesOptions(StreamOptions):
    """Options of `inlinevit features`."""

    output: str
    """File for the features, (height, width, channels): .npy, with the coordinates in a .json file beside it, or .zarr,
    with the coordinates as attributes."""
    stage: int | None = None
    """Stage whose map is written, from 0 on; null = the last map, after the final norm."""
    block: int | None = None
    """Block of the stage after which the map is written, from 0 on; null = the last one."""
    checkpoint: str | None = None
    """With the name of a model, the file of its weights (null = the published ones); with a run, "best" or a checkpoint
    (null = the final weights)."""
    data: PixelOptions = field(default_factory=PixelOptions)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, "", stage=Range(0, MOST_LEVELS), block=Range(0, 10_000))
