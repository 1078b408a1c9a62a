"""From an image to the input of a model: the same for training, evaluation and prediction, but for augmentation."""

import re
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from PIL import Image
from timm.data import create_transform, resolve_data_config
from timm.data.auto_augment import AugmentOp, posterize
from timm.models import get_pretrained_cfg
from torch import Tensor
from torchvision import transforms

from ...data.pixels import PixelFormat, PixelRange, image_to_tensor
from ...engine.config import PixelConfig
from ...utils.validation import FRACTION, Range, require
from ..pixels import make_pixel_format, mean_std_of
from .config import AugmentConfig, ModelConfig

# The parts of timm's policies, by name, with their numbers; timm ignores others without a warning.
LEVEL, COUNT, STD = Range(0, 100), Range(1, 100), Range(0, 1000)
POLICIES = {
    "rand": {"m": LEVEL, "n": COUNT, "p": FRACTION, "mstd": STD, "mmax": COUNT, "inc": FRACTION},
    "augmix": {"m": LEVEL, "w": COUNT, "d": COUNT, "a": Range(0.001, 1000), "b": FRACTION, "mstd": STD},
    **{name: {"mstd": STD} for name in ("original", "originalr", "v0", "v0r", "3a")},
}
# Parts whose numbers need not be whole.
FRACTIONS = ("p", "mstd", "a")
# RandAugment may name a set of transforms: rand-tweights.
TRANSFORM_SETS = ("weights", "3aw", "3a")


@dataclass
class InputSpec:
    """The input of a model.

    Attributes:
        size: Side of its square input.
        mean: By channel.
        std: By channel.
        interpolation: How images are resized.
        crop_pct: Side of the centre crop for evaluation, relative to the image's.
        crop_mode: timm's name of how evaluation crops: center, squash or border.
        bands: Which bands of images it gets; see PixelFormat.
        range: Which values of images become black and white; see PixelFormat.
    """

    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str
    crop_pct: float
    crop_mode: str
    bands: tuple[int, ...] | None = None
    range: PixelRange = "auto"

    @property
    def pixel_format(self) -> PixelFormat:
        """The bands and values of images that it gets."""
        return PixelFormat(len(self.mean), self.bands, self.range)

    def with_pixels(self, data: PixelConfig) -> "InputSpec":
        """Return the same input with the bands and the range of a data config."""
        pixel_format = make_pixel_format(data, len(self.mean))
        return replace(self, bands=pixel_format.bands, range=pixel_format.range)


def input_spec(
    config: ModelConfig, data: PixelConfig | None = None, made_for: dict[str, Any] | None = None
) -> InputSpec:
    """Return the input of a model: what it was made for, unless the configuration says otherwise.

    Args:
        config: The model.
        data: Bands, range and normalisation of the run; None = there is no run.
        made_for: What the model was made for, as timm's pretrained_cfg; None = what timm knows about it.
    """
    if made_for is None:
        registered = get_pretrained_cfg(config.name)
        made_for = registered.to_dict() if registered else {}
    asked = {"in_chans": 3, "crop_pct": config.crop_pct, "img_size": config.img_size}
    spec = resolve_data_config(asked, pretrained_cfg=made_for)
    mean, std = mean_std_of(data, config.in_chans, lambda: (spec["mean"], spec["std"]))
    inputs = InputSpec(spec["input_size"][-1], mean, std, spec["interpolation"], spec["crop_pct"], spec["crop_mode"])
    return inputs if data is None else inputs.with_pixels(data)


class Normalized:
    """From an image or a tensor of bytes to a normalised tensor (channels, height, width).

    The same as torchvision's ToTensor and Normalize.
    """

    def __init__(self, spec: InputSpec) -> None:
        self.mean, self.std = (torch.tensor(values).view(-1, 1, 1) for values in (spec.mean, spec.std))

    def __call__(self, image: Image.Image | Tensor) -> Tensor:
        """Return the image's tensor."""
        if isinstance(image, Tensor):
            values = image.to(torch.float32, copy=True)
        else:
            pixels = torch.from_numpy(np.array(image)).view(image.height, image.width, -1)
            values = pixels.permute(2, 0, 1).to(torch.float32, memory_format=torch.contiguous_format)
        return values.div_(255).sub_(self.mean).div_(self.std)


def training_transform(augment: AugmentConfig, spec: InputSpec) -> Any:
    """Return timm's augmentation of training images."""
    if augment.auto_augment is not None:
        check_policy(augment.auto_augment)
    require(
        augment.scale is not None or augment.crop_padding <= spec.size,
        f"augment.crop_padding is {augment.crop_padding}, but images have {spec.size} pixels along a side: choose at "
        "most as many, or crops would show nothing",
    )
    transform = create_transform(
        spec.size,
        is_training=True,
        scale=augment.scale,
        ratio=augment.ratio,
        hflip=augment.hflip,
        # None takes no time, where 0 would be carried out; timm's types do not know it.
        color_jitter=cast(float, augment.color_jitter or None),
        auto_augment=augment.auto_augment,
        interpolation=spec.interpolation,
        mean=spec.mean,
        std=spec.std,
        re_prob=augment.random_erasing,
        re_mode=augment.random_erasing_mode,
    )
    steps = _with_own_normalization(transform.transforms, spec)
    for step in steps:
        _fix_posterize(step)
    if augment.scale is None:
        # Small images are not zoomed: a border, then a crop of the full size.
        steps[:1] = [transforms.Resize((spec.size, spec.size), transforms.InterpolationMode.BICUBIC)]
        if augment.crop_padding:
            steps[1:1] = [transforms.RandomCrop(spec.size, padding=augment.crop_padding)]
    return _composed(steps, spec)


def _composed(steps: list[Any], spec: InputSpec) -> Any:
    """Compose steps; with other channels than Pillow's images have, they get tensors."""
    return transforms.Compose(steps if len(spec.mean) in (1, 3) else [image_to_tensor, *steps])


def check_policy(policy: str) -> None:
    """Refuse a policy of timm's, such as rand-m9-mstd0.5-inc1, with parts that timm would ignore, or wrong numbers."""
    name, *parts = policy.split("-")
    if name not in POLICIES:
        raise ValueError(
            f"timm has no augmentation called {policy!r}: set augment.auto_augment to one such as "
            "rand-m9-mstd0.5-inc1, augmix-m5-w4-d2 or original, or to null"
        )
    seen = set()
    for part in parts:
        letters = part.rstrip("0123456789.")
        number, allowed = part.removeprefix(letters), POLICIES[name].get(letters)
        if name == "rand" and part.startswith("t") and part[1:] in TRANSFORM_SETS:
            letters = "t"
        elif allowed is None:
            raise ValueError(
                f"augment.auto_augment is {policy!r}, and {name} has no part {part!r}: it has "
                f"{', '.join(POLICIES[name])}, each followed by a number"
            )
        elif not (re.fullmatch(r"\d+(\.\d+)?", number) and allowed.contains(float(number))) or (
            letters not in FRACTIONS and not number.isdecimal()
        ):
            kind = "a number" if letters in FRACTIONS else "a whole number"
            raise ValueError(
                f"augment.auto_augment is {policy!r}: {letters} should be followed by {kind} from {allowed.least} to "
                f"{allowed.most}"
            )
        require(letters not in seen, f"augment.auto_augment is {policy!r}, which has {letters} twice: leave out one")
        seen.add(letters)


def evaluation_transform(spec: InputSpec) -> Any:
    """Return timm's transform for evaluation: resize and crop the centre."""
    transform = create_transform(
        spec.size,
        interpolation=spec.interpolation,
        mean=spec.mean,
        std=spec.std,
        crop_pct=spec.crop_pct,
        crop_mode=spec.crop_mode,
    )
    return _composed(_with_own_normalization(transform.transforms, spec), spec)


def _with_own_normalization(steps: list[Any], spec: InputSpec) -> list[Any]:
    """Replace ToTensor and Normalize among timm's steps by Normalized: for small images, that takes half the time."""
    place = next(place for place, step in enumerate(steps) if isinstance(step, transforms.Normalize))
    return [*steps[: place - 1], Normalized(spec), *steps[place + 1 :]]


def _fix_posterize(step: Any) -> None:
    """Have timm's policies leave at least one bit of an image: Pillow refuses to leave none."""
    policies = [*getattr(step, "ops", []), *(op for policy in getattr(step, "policy", []) for op in policy)]
    for op in policies:
        if isinstance(op, AugmentOp) and op.aug_fn is posterize:
            op.aug_fn = _posterize


def _posterize(image: Image.Image, bits: int, **options: Any) -> Image.Image:
    return posterize(image, max(1, bits), **options)
