"""Packages that not everybody needs, and the extra of this package that installs them."""

from collections.abc import Iterator
from contextlib import contextmanager

EXTRAS = {
    "jsonargparse": "cli",
    "rich": "cli",
    "accelerate": "train",
    "jinja2": "train",
    "matplotlib": "train",
    "torchmetrics": "train",
    "yaml": "train",
    "pycocotools": "detection",
    "segmentation_models_pytorch": "segmentation",
    "tifffile": "huge",
    "zarr": "huge",
    "openslide": "slides",
    "rasterio": "geo",
    "onnx": "export",
    "onnxruntime": "export",
    "onnxscript": "export",
    "openvino": "export",
    "nncf": "export",
    "starlette": "explore",
    "uvicorn": "explore",
}


def missing_extra(error: BaseException) -> str | None:
    """Return the extra that installs what could not be imported; None if it is another error."""
    if not isinstance(error, ModuleNotFoundError):
        return None
    return EXTRAS.get((error.name or "").partition(".")[0])


@contextmanager
def extras_named() -> Iterator[None]:
    """A context in which the error of a missing package says how to install it."""
    try:
        yield
    except ModuleNotFoundError as error:
        extra = missing_extra(error)
        if extra is None:
            raise
        raise ModuleNotFoundError(f"{error}: pip install 'inlinevit[{extra}]'", name=error.name) from error
