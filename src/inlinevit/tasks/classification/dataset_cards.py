"""What a local Hugging Face data set says of itself, checked before the library `datasets` follows it.

A data set's README.md may name its files by any address that fsspec knows. Some are fetched over the network, some are
absolute paths, and some are chains of file systems that interpret the files they are given (`reference://…::…`). A
folder that was copied here may only name files inside of itself.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...utils.files import parse_yaml, read_text

# Where `datasets` looks for the list of files.
CARD, STANDALONE = "README.md", ".huggingface.yaml"
FRONT_MATTER = re.compile(r"\A\s*---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(\r?\n|\Z)", re.DOTALL)


def refuse_addresses(folder: Path) -> None:
    """Refuse a folder whose metadata name files by addresses, absolute paths, or paths that lead out of it.

    Args:
        folder: A data set on this machine.

    Raises:
        ValueError: It does.
    """
    for name in (CARD, STANDALONE):
        file = folder / name
        if not file.exists():
            continue
        for place in _named_files(file):
            if ":" in place or os.path.isabs(place) or place.startswith("~") or ".." in Path(place).parts:
                raise ValueError(
                    f"{file} names the data file {place!r:.100}, which is not a plain path in the folder: correct it, "
                    "or remove the entry"
                )


def _named_files(file: Path) -> Iterator[str]:
    """The paths that metadata give to the configurations of a data set."""
    try:
        text = read_text(file)
        if file.name == CARD:
            matter = FRONT_MATTER.match(text)
            text = matter[1] if matter else ""
        content = parse_yaml(text)
    except ValueError as error:
        raise ValueError(f"{file} has metadata that are not valid YAML ({error}): correct or remove it") from error
    configs = content.get("configs") if isinstance(content, dict) else None
    for config in configs if isinstance(configs, list) else []:
        for key in ("data_files", "data_dir"):
            yield from _words(config.get(key) if isinstance(config, dict) else None)


def _words(value: Any) -> Iterator[str]:
    """All texts in lists and records, at any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _words(inner)
