"""Draw docs/huge_image.png: a class map of one large image in tiles, and of the same image as a whole, streamed.

The image is synthetic: five kinds of land cover, laid out by noise, under one illumination that the model does not
know. Colours alone do not tell the classes apart; the illumination has to be found from the rest of the image. The
model is a small InLine-DeiT with a linear head on its tokens, which is trained on such scenes of 512 × 512 pixels for
some minutes, then applied to a large one.

    python tools/huge_image_figure.py --output docs/huge_image.png
"""

import argparse
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import safetensors.torch
import timm
import torch
import torch.nn.functional as F
from matplotlib import pyplot as plt
from matplotlib.colors import ListedColormap
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

import inlinevit
from inlinevit.data.array_regions import ArrayRegions
from inlinevit.data.image_source import RegionSource
from inlinevit.data.pixels import PixelFormat
from inlinevit.streaming import TensorSink

matplotlib.use("Agg")

STRIDE = 16
MEAN, STD = (0.4, 0.4, 0.35), (0.2, 0.2, 0.2)
CLASSES = ("water", "forest", "grass", "soil", "built-up")
# Reflectance of each class in red, green and blue. They lie near one line: another illumination makes one of another.
REFLECTANCE = np.array(
    [[0.16, 0.20, 0.22], [0.24, 0.30, 0.24], [0.36, 0.42, 0.30], [0.52, 0.50, 0.38], [0.66, 0.64, 0.56]], np.float32
)
MAP_COLORS = ("#3b75af", "#2d6a37", "#9bc25a", "#b98a4f", "#8d8d95")
TRAINING_SIZE = 512
LR = 1e-3
# Pixels of the largest and the smallest patches of land.
COARSEST, FINEST = 512, 32


def noise(rng: np.random.Generator, size: int, coarsest: int, finest: int) -> NDArray[np.float32]:
    """Return a field (size, size) of noise: random grids with cells of some pixels, resized and added."""
    total = np.zeros((size, size), np.float32)
    cell = coarsest
    while cell >= finest:
        count = size // cell + 2
        grid = Image.fromarray(rng.standard_normal((count, count)).astype(np.float32))
        field = np.asarray(grid.resize((count * cell, count * cell), Image.Resampling.BICUBIC))
        total += field[cell // 2 : cell // 2 + size, cell // 2 : cell // 2 + size] * cell
        cell //= 2
    return total / total.std()


def make_scene(rng: np.random.Generator, size: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return an image (size, size, 3) and the class of each pixel."""
    field = noise(rng, size, COARSEST, FINEST)
    # Thresholds of a normal distribution; which class is frequent differs from scene to scene.
    limits = np.sort(rng.normal((-0.9, -0.3, 0.3, 0.9), 0.3))
    labels = np.digitize(field, limits)
    texture = noise(rng, size, 16, 2)[..., None] * 0.03 + rng.normal(0, 0.03, (size, size, 1))
    gain = np.exp(rng.normal(0, 0.25)) * np.exp(rng.normal(0, 0.05, 3))
    values = (REFLECTANCE[labels] + texture) * gain
    return (255 * values.clip(0, 1)).astype(np.uint8), labels


def token_labels(labels: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the most frequent class of each token."""
    height, width = (length // STRIDE for length in labels.shape)
    cells = labels[: height * STRIDE, : width * STRIDE].reshape(height, STRIDE, width, STRIDE)
    counts = np.stack([(cells == one).sum(axis=(1, 3)) for one in range(len(CLASSES))])
    return counts.argmax(axis=0)


def normalize(image: NDArray[np.uint8]) -> Tensor:
    """Return an image (height, width, 3) as the input of the model, (1, 3, height, width)."""
    pixels = torch.from_numpy(image).permute(2, 0, 1)[None].float() / 255
    return (pixels - torch.tensor(MEAN).view(-1, 1, 1)) / torch.tensor(STD).view(-1, 1, 1)


def build_model() -> Any:
    """Return a small InLine-DeiT whose head classifies tokens."""
    return timm.create_model(
        "inline_deit_tiny", embed_dim=64, depth=4, num_heads=2, img_size=TRAINING_SIZE, num_classes=len(CLASSES)
    )


def train(steps: int, seed: int) -> Any:
    """Train the model on new scenes, two per step."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total_steps=steps, pct_start=0.1)
    for step in range(steps):
        scenes = [make_scene(rng, TRAINING_SIZE) for _ in range(2)]
        images = torch.cat([normalize(image) for image, _ in scenes])
        labels = torch.from_numpy(np.stack([token_labels(one) for _, one in scenes])).flatten(1)
        loss = F.cross_entropy(token_logits(model, images).transpose(1, 2), labels)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 20 == 0 or step == steps - 1:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    return model.eval()


def token_logits(model: Any, images: Tensor) -> Tensor:
    """Return the logits of all tokens of the map, (batch, tokens, classes)."""
    return model.head(model.forward_features(images)[:, model.num_prefix_tokens :])


@torch.no_grad()
def classify_tiles(model: Any, image: NDArray[np.uint8], tile: int) -> NDArray[np.int64]:
    """Return the class of each token, where each tile is an image of its own."""
    height, width, _ = image.shape
    rows = []
    for top in range(0, height, tile):
        parts = [normalize(image[top : top + tile, left : left + tile]) for left in range(0, width, tile)]
        maps = [token_logits(model, one).argmax(2).view(one.shape[2] // STRIDE, -1) for one in parts]
        rows.append(torch.cat(maps, dim=1))
    return torch.cat(rows).numpy()


def classify_whole(model: Any, image: NDArray[np.uint8], memory: str) -> NDArray[np.int64]:
    """Return the class of each token of the whole image, streamed."""
    sink = TensorSink()
    source = RegionSource(ArrayRegions(image), PixelFormat(3), MEAN, STD)
    inlinevit.stream(model, source, memory=memory, features={"norm": sink})
    with torch.no_grad():
        return model.head(sink.map).argmax(2).numpy()


def draw(path: Path, image: NDArray[np.uint8], truth: Any, tiled: Any, whole: Any, tile: int) -> None:
    """Draw the image, both class maps and where they differ."""
    figure, axes = plt.subplots(1, 4, figsize=(13, 3.9), dpi=80, layout="constrained")
    colors = ListedColormap(MAP_COLORS)
    size = len(image)
    titles = [
        f"image, {size} × {size} pixels",
        f"tiles of {tile}: {(tiled == truth).mean():.1%} correct",
        f"whole image, streamed: {(whole == truth).mean():.1%} correct",
        f"the two differ in {(tiled != whole).mean():.1%} of tokens",
    ]
    step = max(1, size // 512)
    maps: list[Any] = [image[::step, ::step], tiled, whole, tiled != whole]
    for place, (axis, title, shown) in enumerate(zip(axes, titles, maps, strict=True)):
        options: dict[str, Any] = {}
        if place in (1, 2):
            options = {"cmap": colors, "vmin": -0.5, "vmax": len(CLASSES) - 0.5}
        elif place == 3:
            options = {"cmap": "Greys"}
        axis.imshow(shown, interpolation="nearest", extent=(0, size, size, 0), **options)
        axis.set_title(title, fontsize=10)
        axis.set_xticks(range(0, size + 1, 1024))
        axis.set_yticks([])
    patches = [plt.Rectangle((0, 0), 1, 1, color=color) for color in MAP_COLORS]
    figure.legend(patches, CLASSES, loc="outside lower center", ncols=len(CLASSES), frameon=False)
    figure.savefig(path, pil_kwargs={"optimize": True})
    with Image.open(path) as drawn:
        # A palette makes the file a third of the size.
        drawn.convert("RGB").quantize(192).save(path, optimize=True)


def main() -> None:
    """Train, classify, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("docs/huge_image.png"))
    parser.add_argument("--size", type=int, default=4096, help="side of the large image")
    parser.add_argument("--tile", type=int, default=512, help="side of a tile")
    parser.add_argument("--steps", type=int, default=120, help="training steps")
    parser.add_argument("--weights", type=Path, default=None, help="file that weights are kept in between calls")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and training scenes")
    parser.add_argument("--scene", type=int, default=2, help="number of the large image")
    parser.add_argument("--memory", default="500MB", help="memory for streaming")
    arguments = parser.parse_args()
    if arguments.weights is not None and arguments.weights.exists():
        model = build_model().eval()
        inlinevit.load_checkpoint(model, arguments.weights)
    else:
        model = train(arguments.steps, arguments.seed)
        if arguments.weights is not None:
            safetensors.torch.save_file(model.state_dict(), arguments.weights)
    image, labels = make_scene(np.random.default_rng(10_000 + arguments.scene), arguments.size)
    truth = token_labels(labels)
    tiled, whole = classify_tiles(model, image, arguments.tile), classify_whole(model, image, arguments.memory)
    for name, found in (("tiles", tiled), ("whole", whole)):
        print(f"{name}: {(found == truth).mean():.4f} of tokens are correct")
    print(f"they differ in {(tiled != whole).mean():.4f} of tokens")
    draw(arguments.output, image, truth, tiled, whole, arguments.tile)


if __name__ == "__main__":
    main()
