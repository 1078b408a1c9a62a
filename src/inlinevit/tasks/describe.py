"""What a run starts from, in words."""

from collections.abc import Sized
from typing import Any


def describe_start(name: str, config: Any, train_source: Sized, eval_source: Sized) -> str:
    """Return the model with its initial weights and the numbers of images of a run, in one line.

    Args:
        name: Name of the model.
        config: The run: its `model` has pretrained and checkpoint, its `data` path and max_train_samples.
        train_source: The images for training.
        eval_source: The images for evaluation; `about`, if it has that, says which they are.
    """
    model, data = config.model, config.data
    weights = model.checkpoint or ("the published weights" if model.pretrained else "random weights")
    images = min(len(train_source), data.max_train_samples or len(train_source))
    about = getattr(eval_source, "about", "")
    return (
        f"{name} from {weights}; {data.path}: {images} images for training, {len(eval_source)} for evaluation"
        f"{f' ({about})' if about else ''}"
    )
