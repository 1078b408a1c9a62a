"""From images to what a model sees."""

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import auto_augment, create_transform

from inlinevit.tasks.classification.config import AugmentConfig, ModelConfig
from inlinevit.tasks.classification.transforms import evaluation_transform, input_spec, training_transform

PLAIN = AugmentConfig(scale=None, crop_padding=0, hflip=0.0, color_jitter=0.0, auto_augment=None, random_erasing=0.0)


def noise(*shape):
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8))


def test_what_a_model_was_made_for_is_what_it_sees():
    swin = input_spec(ModelConfig(name="inline_swin_base_384"))
    assert (swin.size, swin.crop_pct, swin.crop_mode, swin.interpolation) == (384, 1.0, "squash", "bicubic")
    deit = input_spec(ModelConfig(name="inline_deit_tiny"))
    assert (deit.size, deit.crop_pct, deit.pixel_format.channels) == (224, 0.875, 3)
    assert input_spec(ModelConfig(name="vit_base_patch16_224")).mean == (0.5, 0.5, 0.5)


def test_the_configuration_comes_first():
    spec = input_spec(ModelConfig(name="inline_deit_tiny", img_size=28, in_chans=1, crop_pct=0.5))
    assert (spec.size, spec.pixel_format.channels, spec.mean, spec.std, spec.crop_pct) == (28, 1, (0.5,), (0.5,), 0.5)


@pytest.mark.parametrize("name", ["inline_deit_tiny", "inline_swin_base_384", "resnet18"])
def test_evaluation_equals_timms_transform_to_the_bit(name):
    spec = input_spec(ModelConfig(name=name))
    theirs = create_transform(
        spec.size,
        interpolation=spec.interpolation,
        mean=spec.mean,
        std=spec.std,
        crop_pct=spec.crop_pct,
        crop_mode=spec.crop_mode,
    )
    image = noise(300, 500, 3)
    assert torch.equal(evaluation_transform(spec)(image), theirs(image))


def test_grey_images_have_one_channel():
    spec = input_spec(ModelConfig(img_size=28, in_chans=1, crop_pct=1.0))
    seen = evaluation_transform(spec)(noise(28, 28))
    assert seen.shape == (1, 28, 28)
    assert seen.min() >= -1
    assert seen.max() <= 1


def test_training_without_augmentation_is_evaluation():
    spec = input_spec(ModelConfig(img_size=32, crop_pct=1.0))
    image = noise(32, 32, 3)
    assert torch.equal(training_transform(PLAIN, spec)(image), evaluation_transform(spec)(image))


def test_small_images_are_padded_and_cropped():
    spec = input_spec(ModelConfig(img_size=16, crop_pct=1.0))
    padded = training_transform(AugmentConfig(**{**vars(PLAIN), "crop_padding": 4}), spec)
    torch.manual_seed(0)
    seen = [padded(noise(16, 16, 3)) for _ in range(20)]
    assert all(image.shape == (3, 16, 16) for image in seen)
    assert len({float(image.sum()) for image in seen}) > 10


@pytest.mark.parametrize("policy", ["rand-m9-mstd0.5-inc1", "augmix-m10-w3", "original", "v0"])
def test_no_policy_of_timms_asks_for_what_pillow_refuses(policy, monkeypatch):
    # Whenever a policy posterizes, it wants no bit to be left; that happens now and then by itself.
    for name in ("Posterize", "PosterizeIncreasing", "PosterizeOriginal"):
        monkeypatch.setitem(auto_augment.LEVEL_TO_ARG, name, lambda level, hparams: (0,))
    transform = training_transform(AugmentConfig(auto_augment=policy), input_spec(ModelConfig(img_size=16)))
    image = noise(20, 20, 3)
    for _ in range(300):
        assert transform(image).isfinite().all()


@pytest.mark.parametrize("policy", ["foo", "random"])
def test_an_unknown_policy_is_refused(policy):
    with pytest.raises(ValueError, match=f"no augmentation called {policy!r}"):
        training_transform(AugmentConfig(auto_augment=policy), input_spec(ModelConfig(img_size=16)))
