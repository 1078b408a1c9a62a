"""`inlinevit hub`: a training run as a model to share, in timm's format for the Hugging Face hub."""

from jsonargparse import ArgumentParser, Namespace

from .parsing import add_import, add_options, new_parser


def hub(
    run: str,
    output: str,
    checkpoint: str | None = None,
    license: str | None = None,
    push: str | None = None,
    private: bool = False,
) -> None:
    """Write a training run as a folder that inlinevit and timm load, with a model card, and upload it with --push.

    Args:
        run: Folder of a training run.
        output: The folder to write: a new or empty one, or one that was written by this command.
        checkpoint: "best", or a checkpoint of the run; null = the final weights.
        license: Licence of the weights, such as apache-2.0; null = the model card says that none is stated.
        push: Upload the folder to the Hugging Face hub as USER/NAME.
        private: With --push, show a new model only to its owner.
    """
    from ..export.hub import Upload, publish
    from ..utils.validation import require

    require(push is not None or not private, "--private is about an upload: name it with --push, or leave it out")
    upload = None if push is None else Upload(push, private)
    address = publish(run, output, checkpoint=checkpoint, license=license, upload=upload)
    print(f"{output}: load it as local-dir:{output}")
    if address is not None:
        print(f"{address}: load it as hf-hub:{push}")


def make_parser() -> ArgumentParser:
    """Return the parser: the arguments of hub()."""
    description = "Write a training run as a folder that inlinevit and timm load, and upload it with --push."
    parser = new_parser("hub", description, "RUN --output FOLDER [options]")
    parser.add_argument("run", type=str, metavar="RUN", help="folder of a training run, of any task")
    parser.add_argument("--private", action="store_true", help="with --push, show a new model only to its owner")
    add_import(parser)
    add_options(parser, hub, skip=["run", "private"])
    return parser


def run(settings: Namespace) -> None:
    """Write the folder, and upload it."""
    hub(**vars(settings))
