"""How the user has started this program, for messages that name its next command."""

import shlex
import shutil
import sys
from pathlib import Path

NAME = "inlinevit"


def program_name() -> str:
    """Return the word to type for this program: its name, or its path if a shell would not find it by its name."""
    program = Path(sys.argv[0])
    if program.name != NAME or not program.is_file():
        return NAME
    found = shutil.which(NAME)
    if found is not None and Path(found).resolve() == program.resolve():
        return NAME
    path = program.absolute()
    return shlex.quote(str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path))
