"""Importing modules that the user names on the command line. No file that is read can do this."""

import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module

from .validation import require

NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
# The modules that the present command has imported.
IMPORTED: list[str] = []
# The one that is being imported now, if there is one.
IMPORTING: list[str] = []


def import_modules(names: Sequence[str]) -> None:
    """Import modules, from where Python finds them or, if it does not, from the current folder.

    Args:
        names: Names as in an import statement.

    Raises:
        ValueError: A module does not exist, or its import fails.
    """
    IMPORTED[:] = names
    for name in names:
        require(
            NAME.fullmatch(name) is not None,
            f"--import {name!r:.100} is not the name of a module: write it as in an import statement, without .py",
        )
        IMPORTING.append(name)
        # At the end, so that nothing in the current folder replaces an installed package, and for this import only.
        folder = os.getcwd()
        is_new = folder not in sys.path
        if is_new:
            sys.path.append(folder)
        try:
            import_module(name)
        except ModuleNotFoundError as error:
            if error.name is not None and f"{name}.".startswith(f"{error.name}."):
                raise ValueError(
                    f"--import {name}: there is no module {error.name}: install the package, or change to its folder"
                ) from error
            raise ValueError(f"--import {name} needs {error.name}, which is not installed: install it") from error
        # A module can fail in any way.
        except Exception as error:
            problem = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise ValueError(f"--import {name} failed ({problem}): correct the module") from error
        finally:
            IMPORTING.pop()
            if is_new and folder in sys.path:
                sys.path.remove(folder)
