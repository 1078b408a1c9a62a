"""`inlinevit [TASK] predict`: predict images."""

from jsonargparse import ArgumentParser, Namespace

from ..tasks import TaskEntry
from .parsing import add_import, add_model, add_options, new_parser, to_config


def make_parser(entry: TaskEntry) -> ArgumentParser:
    """Return the parser: a model, images, and the task's PredictOptions."""
    description = f"Predict images with a model for {entry.description}."
    parser = new_parser(entry.command_line("predict"), description, "MODEL IMAGE... [options]")
    add_model(parser, entry)
    about = "images, folders of images, or patterns such as '*.jpg'"
    parser.add_argument("images", nargs="+", type=str, metavar="IMAGE", help=about)
    add_import(parser)
    add_options(parser, entry.load_predict_options())
    return parser


def run(entry: TaskEntry, settings: Namespace) -> int:
    """Predict images."""
    from ..engine.predictor import predict_command

    options = to_config(settings, entry.load_predict_options())
    return predict_command(entry.load_task(), settings.model, settings.images, options)
