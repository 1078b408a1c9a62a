"""`inlinevit segment predict --stream`: the label map of one image of any size."""

import os
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from ...data.images import printable
from ...data.map_files import Coordinates, LabelMapSink
from ...engine.outputs import check_output_file
from ...engine.results import shorten_list
from ...engine.stream_options import LabelStreamOptions
from ...models.hub import fetch_source
from ...streaming.decoders import SegmentationNetwork
from ...streaming.segmenter import check_segmenter
from ...utils.validation import require
from ..backbone import STRIDES
from ..streaming import check_map_files, check_predict_options, open_source, run_stream, token_mask
from .config import SegmentationPredictOptions
from .predictor import CLASSES_SHOWN, SegmentationPredictor
from .visualize import whole_percent


def stream_labels_command(
    task: Any,
    model: str,
    images: Sequence[str],
    options: SegmentationPredictOptions,
    streamed: LabelStreamOptions,
) -> int:
    """Run `segment predict --stream`: write the label map of one image, at its own resolution.

    Args:
        task: The class of the task.
        model: The folder of a run.
        images: What the user has called the image: one path.
        options: The options of `segment predict`.
        streamed: How the image is streamed.

    Returns:
        The exit code.
    """
    check_predict_options(options, images)
    for name, value in vars(options.inference).items():
        require(
            value is None,
            f"--inference.{name} has no effect on a streamed image, which is processed as a whole, at its own "
            "resolution: leave it out",
        )
    require(
        int(os.environ.get("WORLD_SIZE", "1")) == 1,
        "several processes cannot share the image of a segmentation model: start one process",
    )
    inputs = [*images, *(path for path in (options.checkpoint, streamed.mask) if path)]
    output = check_output_file(options.output, inputs)
    probabilities = None if streamed.probabilities is None else check_output_file(streamed.probabilities, inputs)
    check_map_files(output, probabilities)
    predictor: SegmentationPredictor = task.load_predictor(fetch_source(model), options)
    require(
        isinstance(predictor.model, SegmentationNetwork),
        f"{model} cannot be streamed: name the run of a segmentation model",
    )
    check_segmenter(predictor.model)
    labels = predictor.labels
    with open_source(images[0], predictor, options.data, streamed) as source:
        mask = token_mask(source, STRIDES[0], options.data, streamed)
        sink = LabelMapSink(
            output,
            Coordinates.of(source),
            [one.values[0] for one in labels.classes],
            ignored=labels.ignored[0] if labels.ignored else None,
            probabilities=probabilities,
            mask=None if mask is None else mask.numpy(),
            mask_stride=STRIDES[0],
        )
        run_stream(predictor.model, source, mask, {"logits": sink}, streamed)
    width, height = sink.size
    total = max(1, int(sink.counts.sum()))
    shares = [(one.name, count / total) for one, count in zip(labels.classes, sink.counts, strict=True)]
    found = sorted((one for one in shares if one[1] > 0), key=itemgetter(1), reverse=True)
    shown = shorten_list([f"{name} {whole_percent(share)}" for name, share in found], CLASSES_SHOWN)
    print(printable(f"{output}: labels of {width} × {height} pixels: {shown}"))
    return 0
