"""The explorer as files: rows of some queries, precomputed, for any web server."""

import json
import shutil
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from ..analysis.layer import Layer
from ..utils.atomic import atomic_folder
from ..utils.files import read_json
from ..utils.validation import require
from .capture import Capture
from .explorer import Explorer, encode_row, one_thread
from .rows import KINDS, query_row
from .server import WEB, web_files

# What is written of each image and model: layers, queries of a layer, bytes of the weights of a layer.
MOST_LAYERS = 6
MOST_QUERIES = 49
FEWEST_QUERIES = 4
MOST_LAYER_BYTES = 100_000
MOST_IMAGES = 4
STATE = "state.json"
MARKER = "inlinevit explorer"


def check_site(folder: Path) -> None:
    """Refuse a folder with other files than those of an explorer: it is replaced."""
    require(not folder.is_file(), f"{folder} is a file: name a folder with --static")
    if folder.is_dir() and any(folder.iterdir()):
        try:
            made = read_json(folder / STATE)
        except (OSError, ValueError):
            made = None
        require(
            isinstance(made, dict) and made.get("made_by") == MARKER,
            f"{folder} has other files than those of an explorer: name a new folder with --static",
        )


def write_site(explorer: Explorer, folder: Path, samples: Sequence[int], console: Console) -> int:
    """Write a folder that shows some samples of an explorer without a server of its own; return its bytes.

    Args:
        explorer: Models and samples.
        folder: Where to write; an explorer that is there is replaced.
        samples: Which samples.
        console: Where to show the progress.
    """
    with atomic_folder(folder) as aside:
        (aside / "web").mkdir(parents=True)
        for name in web_files():
            with resources.as_file(WEB.joinpath(name)) as file:
                shutil.copyfile(file, aside / ("index.html" if name == "index.html" else f"web/{name}"))
        with one_thread():
            images = [
                write_image(explorer, index, place, aside)
                for place, index in enumerate(track(samples, "images", console=console))
            ]
        titles = [{"title": image["title"]} for image in images]
        state = {**explorer.state(), "mode": "static", "made_by": MARKER, "samples": titles, "images": images}
        write_json(aside / STATE, state)
        size = sum(file.stat().st_size for file in aside.rglob("*") if file.is_file())
    return size


@torch.no_grad()
def write_image(explorer: Explorer, index: int, place: int, folder: Path) -> dict[str, Any]:
    """Write the pictures and rows of one sample, and return what the page has to know of it."""
    described = explorer.open_sample(index)
    home = folder / "data" / str(place)
    home.mkdir(parents=True)
    (home / "sample.png").write_bytes(explorer.sample_png(index))
    number = described["image"]
    for model, one in enumerate(described["models"]):
        (home / f"{model}.png").write_bytes(explorer.png(number, model))
        found = explorer.capture_of(number, model)
        kept = chosen_layers(found)
        one["picture"] = f"data/{place}/{model}.png"
        one["layers"] = [{**one["layers"][layer], "number": layer} for layer in kept]
        one["locality"] = explorer.locality(number, model)
        one["hidden"] = {side: explorer.hidden(number, model, side) for side in one["sides"]}
        for file, layer in enumerate(kept):
            chosen = found.layers[layer]
            queries = chosen_queries(chosen)
            kinds = list(dict.fromkeys((*KINDS, chosen.attention)))
            rows = [
                {
                    "layer": layer,
                    "query": list(query),
                    "size": list(chosen.size),
                    "columns": [encode_row(query_row(chosen, query, kind), quantize=True) for kind in kinds],
                }
                for query in queries
            ]
            write_json(home / f"{model}-{file}.json", rows)
            one["layers"][file]["queries"] = [list(query) for query in queries]
    return described


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file without white space."""
    path.write_text(json.dumps(value, separators=(",", ":"), ensure_ascii=False), encoding="utf-8")


def chosen_layers(found: Capture) -> list[int]:
    """Return the indices of layers that are written, from the first to the last."""
    count = len(found.layers)
    if count <= MOST_LAYERS:
        return list(range(count))
    return [round(place * (count - 1) / (MOST_LAYERS - 1)) for place in range(MOST_LAYERS)]


def chosen_queries(layer: Layer) -> list[tuple[int, int]]:
    """Return the queries of a layer that are written: a regular grid, all of them if they are few."""
    height, width = layer.size
    by_query = 3 * layer.q.shape[1] * height * width
    most = max(FEWEST_QUERIES, min(MOST_QUERIES, MOST_LAYER_BYTES // by_query))
    step = 1
    while len(range(step // 2, height, step)) * len(range(step // 2, width, step)) > most:
        step += 1
    return [(row, column) for row in range(step // 2, height, step) for column in range(step // 2, width, step)]
