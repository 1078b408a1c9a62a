"""The command line: `inlinevit COMMAND`. One file per command; commands.py is the table of them."""

from .dispatch import main

__all__ = ["main"]
