"""Consoles of rich."""

from typing import IO

from rich.console import Console


def new_console(
    *,
    stderr: bool = False,
    quiet: bool = False,
    highlight: bool = True,
    soft_wrap: bool = False,
    file: IO[str] | None = None,
    width: int | None = None,
) -> Console:
    """Return a console that writes plain text in a notebook.

    There, rich would write HTML and ask for ipywidgets at each step of a progress bar; and the streams of a notebook
    claim to be terminals, but show each state of a bar below the one before.

    Args:
        stderr: Write to standard error instead of standard output.
        quiet: Write nothing.
        highlight: Colour numbers and the like.
        soft_wrap: Do not break lines.
        file: Where to write, in place of both.
        width: In characters; None = that of the terminal.
    """
    is_notebook = Console().is_jupyter
    return Console(
        stderr=stderr,
        quiet=quiet,
        highlight=highlight,
        soft_wrap=soft_wrap,
        file=file,
        width=width,
        force_jupyter=False,
        force_terminal=False if is_notebook else None,
    )
