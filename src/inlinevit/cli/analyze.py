"""`inlinevit analyze`: confusion, locality, masking and maps of the attention of models."""

from jsonargparse import ArgumentParser, Namespace

from .parsing import add_import, add_options, new_parser


def analyze(
    models: list[str],
    data: str | None = None,
    images: int = 64,
    confusion_images: int = 8,
    checkpoint: str | None = None,
    img_size: int | None = None,
    batch_size: int = 16,
    epsilon: float = 0.01,
    delta: float = 0.1,
    untrained: bool = False,
    device: str | None = None,
    output: str = "runs/analysis",
) -> None:
    """Measure confusion, locality, masking and maps of the attention of models, side by side.

    Args:
        models: Folders of training runs, names of models of this library or of timm, or published models
            (hf-hub:USER/NAME, local-dir:FOLDER).
        data: Labelled images, as for inlinevit train; their evaluation split is used. null = those of the first model's
            training run, or the embedded ones.
        images: Number of images to measure locality and masking on.
        confusion_images: Number of images to count confused pairs of queries on, which is slow for large maps.
        checkpoint: As for inlinevit eval; the same for all models.
        img_size: Side of the images that the models see; null = what they were trained for.
        batch_size: Images in a batch.
        epsilon: Attention weights of two queries that are nearer than this, relative to the larger norm, count as the
            same.
        delta: Queries farther apart than this, relative to the larger norm, count as different.
        untrained: Use random weights. Names may have options then, such as inline_deit_tiny:attention=linear.
        device: Where to compute, such as cpu or cuda; null = the best device there is.
        output: Folder for analysis.html, analysis.json and figures/.
    """
    from ..analysis.analyze import AnalysisSettings, analyze_command

    analyze_command(
        models,
        AnalysisSettings(images, confusion_images, batch_size, epsilon, delta),
        data=data,
        checkpoint=checkpoint,
        img_size=img_size,
        untrained=untrained,
        device=device,
        output=output,
    )


def make_parser() -> ArgumentParser:
    """Return the parser: the arguments of analyze()."""
    description = "Measure confusion, locality, masking and maps of the attention of models."
    parser = new_parser("analyze", description, "MODEL... [options]")
    about = "folders of training runs, or names of models"
    parser.add_argument("models", nargs="+", type=str, metavar="MODEL", help=about)
    parser.add_argument(
        "--untrained",
        action="store_true",
        help="use random weights; names may have options then, such as inline_deit_tiny:attention=linear",
    )
    add_import(parser)
    add_options(parser, analyze, skip=["models", "untrained"])
    return parser


def run(settings: Namespace) -> None:
    """Analyze models."""
    analyze(**vars(settings))
