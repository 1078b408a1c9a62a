"""Consoles of rich."""

from rich.console import Console


def new_console(
    *, stderr: bool = False, quiet: bool = False, highlight: bool = True, soft_wrap: bool = False
) -> Console:
    """Return a console that writes text, also in a notebook.

    There, rich would write HTML, and would ask for ipywidgets at each step of a progress bar.

    Args:
        stderr: Write to standard error instead of standard output.
        quiet: Write nothing.
        highlight: Colour numbers and the like.
        soft_wrap: Do not break lines.
    """
    return Console(stderr=stderr, quiet=quiet, highlight=highlight, soft_wrap=soft_wrap, force_jupyter=False)
