"""`inlinevit explore`: look at the attention of models in the browser."""

from jsonargparse import ArgumentParser, Namespace

from .parsing import add_import, add_options, new_parser


def explore(
    models: list[str],
    images: list[str] | None = None,
    static: str | None = None,
    pretrained: bool = False,
    checkpoint: str | None = None,
    img_size: int | None = None,
    device: str | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    no_browser: bool = False,
    max_pixels: int | None = None,
) -> None:
    """Open a local web page that shows the attention of models: click a patch, and see which weights it gives.

    Args:
        models: Folders of training runs, or of several runs, such as runs/demo; names of models of this library or of
            timm; or published models (hf-hub:USER/NAME, local-dir:FOLDER). None = runs/demo if there is one, else
            three models with random weights.
        images: Pictures to offer: files, folders or patterns. Any picture can be dropped into the page.
        static: Write the page with some pictures to this folder, for any web server, instead of serving it.
        pretrained: Download the published weights of models that are given by name.
        checkpoint: As for inlinevit eval; the same for all models.
        img_size: Side of the images that the models see; null = what they were trained for.
        device: Where to compute, such as cpu or cuda; null = the best device there is.
        host: Name or address to listen on. Others than 127.0.0.1 let everyone in your network use it.
        port: Port to listen on; 0 = a free one.
        no_browser: Do not open the page in a browser.
        max_pixels: Pictures with more pixels are refused; null = 50 megapixels.
    """
    from ..explore.command import explore_command

    explore_command(
        models,
        images=images or (),
        static=static,
        pretrained=pretrained,
        checkpoint=checkpoint,
        img_size=img_size,
        device=device,
        host=host,
        port=port,
        browser=not no_browser,
        max_pixels=max_pixels,
    )


def make_parser() -> ArgumentParser:
    """Return the parser: the arguments of explore()."""
    description = "Explore the attention of models in the browser: click a patch of a picture, and see its weights."
    parser = new_parser("explore", description, "[MODEL...] [options]")
    about = "folders of training runs, or names of models; runs/demo if there is one, else random weights"
    parser.add_argument("models", nargs="*", type=str, default=[], metavar="MODEL", help=about)
    about = "pictures to offer: files, folders or patterns; any other can be dropped into the page"
    parser.add_argument("--images", nargs="+", type=str, default=None, metavar="IMAGE", help=about)
    about = "download the published weights of models that are given by name; they are random otherwise"
    parser.add_argument("--pretrained", action="store_true", help=about)
    parser.add_argument("--no-browser", action="store_true", help="do not open the page in a browser")
    about = "pictures with more pixels are refused; 50 megapixels by default"
    parser.add_argument("--max-pixels", type=int, default=None, metavar="PIXELS", help=about)
    add_import(parser)
    add_options(parser, explore, skip=["models", "images", "pretrained", "no_browser", "max_pixels"])
    return parser


def run(settings: Namespace) -> None:
    """Explore models."""
    explore(**vars(settings))
