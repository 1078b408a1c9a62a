"""`inlinevit [TASK] predict`: predict images."""

from jsonargparse import ArgumentParser, Namespace

from ..engine.config import ClassPredictOptions
from ..engine.stream_options import StreamPredictOptions
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
    if can_stream(entry):
        add_stream(parser)
        add_options(parser, StreamPredictOptions, skip=["stream"])
    return parser


def can_stream(entry: TaskEntry) -> bool:
    """Whether the models of a task can be streamed: those that predict classes of images."""
    return issubclass(entry.load_predict_options(), ClassPredictOptions)


def run(entry: TaskEntry, settings: Namespace) -> int:
    """Predict images."""
    from ..engine.predictor import predict_command

    options = to_config(settings, entry.load_predict_options())
    if can_stream(entry) and (streamed := to_config(settings, StreamPredictOptions)).stream:
        from ..tasks.streaming import stream_predict_command

        return stream_predict_command(entry.load_task(), settings.model, settings.images, options, streamed)
    return predict_command(entry.load_task(), settings.model, settings.images, options)
