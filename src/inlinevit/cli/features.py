"""`inlinevit features`: write the feature map of an image."""

from jsonargparse import ArgumentParser, Namespace

from ..engine.stream_options import FeaturesOptions
from .parsing import add_import, add_options, add_stream, new_parser, to_config


def make_parser() -> ArgumentParser:
    """Return the parser: a model, an image, and FeaturesOptions."""
    description = "Write a map of features of one image, of any size with --stream."
    parser = new_parser("features", description, "MODEL IMAGE --output FILE [options]")
    parser.add_argument("model", type=str, metavar="MODEL", help="folder of a training run, or name of a model")
    parser.add_argument("image", type=str, metavar="IMAGE", help="file or Zarr folder of the image")
    add_import(parser)
    add_stream(parser)
    add_options(parser, FeaturesOptions, skip=["stream"])
    return parser


def run(settings: Namespace) -> int:
    """Write a map of features."""
    from ..tasks.streaming import features_command

    return features_command(settings.model, settings.image, to_config(settings, FeaturesOptions))
