"""`inlinevit [TASK] predict`: predict images."""

from jsonargparse import ArgumentParser, Namespace

from ..engine.config import ClassPredictOptions
from ..engine.stream_options import LabelStreamOptions, StreamOptions, StreamPredictOptions
from ..tasks import TaskEntry
from .parsing import add_import, add_model, add_options, add_stream, new_parser, to_config


def make_parser(entry: TaskEntry) -> ArgumentParser:
    """Return the parser: a model, images, and the task's PredictOptions."""
    description = f"Predict images with a model for {entry.description}."
    parser = new_parser(entry.command_line("predict"), description, "MODEL IMAGE... [options]")
    add_model(parser, entry)
    about = "images, folders of images, or patterns such as '*.jpg'"
    parser.add_argument("images", nargs="+", type=str, metavar="IMAGE", help=about)
    add_import(parser)
    add_options(parser, entry.load_predict_options())
    kind = stream_options(entry)
    if kind is not None:
        add_stream(parser)
        add_options(parser, kind, skip=["stream"])
    return parser


def stream_options(entry: TaskEntry) -> type[StreamOptions] | None:
    """Return how the models of a task are streamed: those that predict classes, of images or pixels."""
    if issubclass(entry.load_predict_options(), ClassPredictOptions):
        return StreamPredictOptions
    return LabelStreamOptions if entry.name == "segmentation" else None


def run(entry: TaskEntry, settings: Namespace) -> int:
    """Predict images."""
    from ..engine.predictor import predict_command

    options = to_config(settings, entry.load_predict_options())
    kind = stream_options(entry)
    streamed = None if kind is None else to_config(settings, kind)
    if isinstance(streamed, StreamPredictOptions) and streamed.stream:
        from ..tasks.streaming import stream_predict_command

        return stream_predict_command(entry.load_task(), settings.model, settings.images, options, streamed)
    if isinstance(streamed, LabelStreamOptions) and streamed.stream:
        from ..tasks.segmentation.streaming import stream_labels_command

        return stream_labels_command(entry.load_task(), settings.model, settings.images, options, streamed)
    return predict_command(entry.load_task(), settings.model, settings.images, options)
