"""`inlinevit predict --stream` and `inlinevit features`: one image of any size through a model."""

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..data.image_source import RegionSource, choose_box, choose_level, name_of, open_regions
from ..data.images import is_pattern, printable
from ..data.map_files import TIFF, ClassMapSink, Coordinates, check_head, feature_sink, read_head
from ..data.regions import readable
from ..data.token_masks import make_token_mask
from ..engine.config import ClassPredictOptions, PixelOptions, PredictOptions
from ..engine.errors import Stopped
from ..engine.outputs import check_output_file
from ..engine.predictor import override_pixels
from ..engine.progress import job_progress
from ..engine.results import CLASS_WRITERS, Prediction, write_parquet
from ..engine.setup import cpu_process_group
from ..engine.stream_options import FeaturesOptions, StreamOptions, StreamPredictOptions
from ..models._inline_vit import InLineViT, tokens_to_map
from ..models.hub import fetch_source
from ..models.inference import optimize_for_inference
from ..streaming import HeadSink, MapSink, stream
from ..utils.atomic import atomic_path, atomic_text_writer
from ..utils.memory import require_memory_for_images
from ..utils.validation import require
from .classification.predictor import ImagePredictor
from .loading import load

if TYPE_CHECKING:
    from .segmentation.predictor import SegmentationPredictor

# The map after the final norm.
LAST_MAP = "norm"
PERCENT = 100


def stream_predict_command(
    task: Any, model: str, images: Sequence[str], options: ClassPredictOptions, streamed: StreamPredictOptions
) -> int:
    """Run `predict --stream`: print or write the classes of one image, or write a map of the classes of its tokens.

    Args:
        task: The class of the task.
        model: The folder of a run, or the name of a model.
        images: What the user has called the image: one path.
        options: The options of `predict`.
        streamed: How the image is streamed.

    Returns:
        The exit code.
    """
    check_predict_options(options, images)
    with cpu_process_group(timedelta(minutes=streamed.timeout_minutes)) as group:
        return _stream_predict(task, model, images, options, streamed, group)


def _stream_predict(
    task: Any,
    model: str,
    images: Sequence[str],
    options: ClassPredictOptions,
    streamed: StreamPredictOptions,
    group: dist.ProcessGroup | None,
) -> int:
    """See stream_predict_command; several processes share the image, and the first of them writes."""
    inputs = [*images, *(path for path in (options.checkpoint, streamed.head, streamed.mask) if path)]
    outputs = [
        None if one is None else check_output_file(one, inputs) for one in (options.output, streamed.probabilities)
    ]
    head = None if streamed.head is None else read_head(streamed.head)
    predictor, network = _check_predictor(
        model, _local_main_first(lambda: task.load_predictor(fetch_source(model), options), group)
    )
    if head is not None:
        output, probabilities = outputs
        if output is None:
            raise ValueError("--head writes a map: name a .tif file with --output")
        check_map_files(output, probabilities)
        require(
            options.format == "auto", f"--format {options.format} is for classes of images: leave it out with --head"
        )
        check_head(head, network.num_features, f"the last map of {predictor.name}")
    with open_source(images[0], predictor, options.data, streamed) as source:
        mask = token_mask(source, network.reductions[0], options.data, streamed)
        sinks: dict[str, MapSink] = {}
        if head is not None:
            assert outputs[0] is not None
            classes = ClassMapSink(
                outputs[0],
                Coordinates.of(source),
                probabilities=outputs[1],
                mask=None if mask is None else mask.numpy(),
                mask_stride=network.reductions[0],
            )
            sinks[LAST_MAP] = HeadSink(head.weight, head.bias, classes)
        logits = run_stream(network, source, mask, sinks, streamed, group)
    if not _is_first(group):
        return 0
    if head is None:
        return _write_classes(predictor, name_of(images[0]), logits, options, outputs[0])
    width, height = classes.size
    side = classes.stride
    print(printable(f"{outputs[0]}: classes of {width} × {height} tokens, one for {side} × {side} pixels"))
    return 0


def features_command(model: str, image: str, options: FeaturesOptions) -> int:
    """Run `features`: write one map of a model, streamed or by a plain forward pass; returns the exit code."""
    with cpu_process_group(timedelta(minutes=options.timeout_minutes)) as group:
        return _features(model, image, options, group)


def _features(model: str, image: str, options: FeaturesOptions, group: dist.ProcessGroup | None) -> int:
    """See features_command; several processes share the image, and the first of them writes."""
    require(group is None or options.stream, "several processes share an image that is streamed only: add --stream")
    inputs = [image, *(path for path in (options.checkpoint, options.mask) if path)]
    require(bool(options.output.strip()), "--output is empty: name a .npy or .zarr file for the features")
    output = Path(options.output)
    if not output.is_dir():
        check_output_file(options.output, inputs)
    predictor, network = _check_predictor(
        model, _local_main_first(lambda: load(model, checkpoint=options.checkpoint, device="cpu"), group)
    )
    name = map_name(network, options.stage, options.block)
    with open_source(image, predictor, options.data, options) as source:
        sink = feature_sink(output, Coordinates.of(source))
        if options.stream:
            mask = token_mask(source, network.reductions[0], options.data, options)
            run_stream(network, source, mask, {name: sink}, options, group)
        else:
            write_plain(network, source, name, sink)
    if not _is_first(group):
        return 0
    height, width, channels = sink.shape
    side = sink.stride
    print(printable(f"{output}: {width} × {height} tokens of {channels} channels, one for {side} × {side} pixels"))
    return 0


@contextmanager
def open_source(
    image: str, predictor: "ImagePredictor | SegmentationPredictor", pixels: PixelOptions, options: StreamOptions
) -> Iterator[RegionSource]:
    """Open the part of an image that options name, with the bands, values and normalisation of a model."""
    pixel_format, max_pixels = override_pixels(predictor, pixels)
    name = name_of(image)
    with open_regions(image, max_pixels) as reader:
        with readable(name):
            level, about = choose_level(reader, options.level, options.mpp)
            box = choose_box(reader, level, options.parse_region())
        if about:
            print(printable(f"{name}: {about}"), file=sys.stderr)
        yield RegionSource(reader, pixel_format, *predictor.mean_std, level=level, box=box, name=name)


def run_stream(
    network: nn.Module,
    source: RegionSource,
    mask: Tensor | None,
    sinks: dict[str, MapSink],
    options: StreamOptions,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Stream an image, with progress on stderr, by all processes of a group; returns the logits of the model."""
    fast: Any = optimize_for_inference(network, compile=False)
    with ExitStack() as stack:
        stack.enter_context(stops_on_sigterm())
        progress = None
        if _is_first(group):
            progress = _count_percent(stack.enter_context(job_progress("streaming", PERCENT, "%")))
        return stream(
            fast,
            source,
            memory=options.memory,
            spill=options.spill,
            mask=mask,
            features=sinks,
            progress=progress,
            resume=options.state,
            group=group,
        )


def _is_first(group: dist.ProcessGroup | None) -> bool:
    """Return whether this process writes the results."""
    return group is None or dist.get_rank(group) == 0


def _local_main_first(load_model: Callable[[], Any], group: dist.ProcessGroup | None) -> Any:
    """Load a model in one process of each machine first, since weights may be downloaded."""
    is_main = os.environ.get("LOCAL_RANK", "0") == "0"
    if group is not None and not is_main:
        dist.barrier(group)
    loaded = load_model()
    if group is not None and is_main:
        dist.barrier(group)
    return loaded


def _count_percent(advance: Callable[[], None]) -> Callable[[float], None]:
    """Return a function that is called with the fraction of the work that is done, and counts percents."""
    counted = 0

    def report(done: float) -> None:
        nonlocal counted
        while counted < int(PERCENT * done):
            counted += 1
            advance()

    return report


@contextmanager
def stops_on_sigterm() -> Iterator[None]:
    """A context in which SIGTERM raises Stopped, so that files that are not complete are removed."""

    def stop(number: int, frame: object) -> None:
        raise Stopped("stopped: nothing was written", number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@torch.no_grad()
def write_plain(network: InLineViT, source: RegionSource, name: str, sink: Any) -> None:
    """Compute one map by a plain forward pass of the whole image, and write it."""
    width, height = source.size
    remedy = "add --stream, or choose a smaller --region"
    require_memory_for_images(1, source.channels, height, width, remedy)
    image = source.rows(0, height)[None]
    features, stride = plain_map(network, image, name)
    rows = features[0].permute(1, 2, 0).contiguous()
    with ExitStack() as stack:
        stack.callback(sink.abort)
        sink.begin(tuple(rows.shape), stride)
        sink.write_rows(0, rows)
        sink.close()


def plain_map(network: InLineViT, image: Tensor, name: str) -> tuple[Tensor, int]:
    """Return a map (batch, channels, H, W) of a model by its name, as in `inlinevit.stream`, and its stride."""
    words = name.split(".")
    wanted = int(words[1]) if words[0] == "stages" else None
    take = [int(words[3])] if len(words) > 2 else []
    x = image
    for index, stage in enumerate(network.stage_list()):
        here = take if index == wanted else []
        tokens, feat_size, taken = stage.forward_tokens(x, here, here[0] if here else None)
        prefix = stage.num_prefix_tokens
        if index == wanted:
            return tokens_to_map(taken[0] if taken else tokens, feat_size, prefix), network.reductions[index]
        x = tokens_to_map(tokens, feat_size, prefix)
    return tokens_to_map(network.norm(tokens), feat_size, prefix), network.reductions[-1]


def map_name(network: InLineViT, stage: int | None, block: int | None) -> str:
    """Return the name of a map; without stage and block, that of the last one, after the final norm."""
    stages = network.stage_list()
    if stage is None and block is None:
        return LAST_MAP
    require(
        stage is not None or len(stages) == 1, f"--block {block} is in one of {len(stages)} stages: give --stage, too"
    )
    number = stage or 0
    require(number < len(stages), f"there is no stage {number}: the model has stages 0 to {len(stages) - 1}")
    blocks = len(stages[number].blocks)
    require(
        block is None or block < blocks,
        f"there is no block {block}: stage {number} of the model has blocks 0 to {blocks - 1}",
    )
    return f"stages.{number}" if block is None else f"stages.{number}.blocks.{block}"


def token_mask(source: RegionSource, stride: int, pixels: PixelOptions, options: StreamOptions) -> Tensor | None:
    """Return which tokens of the first stage, of `stride` × `stride` pixels each, count."""
    if options.mask is None:
        return None
    return torch.from_numpy(make_token_mask(options.mask, source, stride, pixels.max_pixels))


def _check_predictor(model: str, predictor: Any) -> tuple[ImagePredictor, InLineViT]:
    """Return a predictor and its network, if it can be streamed."""
    network = getattr(predictor, "model", None)
    if not isinstance(predictor, ImagePredictor) or not isinstance(network, InLineViT):
        raise ValueError(
            f"{model} cannot be streamed: name a model of this library for classification (`inlinevit models`), or a "
            "run of one"
        )
    return predictor, network


def check_predict_options(options: PredictOptions, images: Sequence[str]) -> None:
    """Refuse options that have no effect on a streamed image."""
    require(
        len(images) == 1 and not is_pattern(images[0]),
        "--stream takes one image: run the command for each of them",
    )
    require(options.device in (None, "cpu"), "--stream computes on the CPU: leave out --device")
    require(options.resume == "auto", "--resume has no effect on a streamed image: see --state")
    defaults = {"batch_size": 32, "img_size": None}
    for name, default in defaults.items():
        require(
            vars(options).get(name, default) == default,
            f"--{name} has no effect on a streamed image, which is not resized: leave it out",
        )


def check_map_files(output: Path, probabilities: Path | None) -> None:
    """Refuse files of class maps that are not TIFF files, or the same."""
    for path in (output, probabilities):
        require(
            path is None or path.suffix.lower() in TIFF,
            f"{path} should end in .tif, the format of class maps: rename it",
        )
    require(output != probabilities, f"--output and --probabilities both name {output}: name two files")


def _write_classes(
    predictor: ImagePredictor, name: str, logits: Tensor, options: ClassPredictOptions, output: Path | None
) -> int:
    """Print or write the classes of an image; returns the exit code."""
    (result,) = predictor.rank(logits, options)
    require(result is not None, f"{name} gives NaN or infinite values: check the model's weights")
    prediction = Prediction(name, result=result)
    format = options.chosen_format()
    if format == "parquet":
        if output is None:
            raise ValueError("Parquet cannot be printed: name a file for the results with --output")
        with atomic_path(output) as aside:
            write_parquet([prediction], aside)
    elif output is None:
        CLASS_WRITERS[format]([prediction], sys.stdout)
    else:
        with atomic_text_writer(output, newline="") as text:
            CLASS_WRITERS[format]([prediction], text)
    return 0
