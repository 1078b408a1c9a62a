"""`inlinevit info`: versions, devices, and whether there are native kernels."""

import json
import platform

from jsonargparse import ArgumentParser, Namespace

from .. import __version__
from .parsing import new_parser


def collect() -> dict[str, str]:
    """Return what is worth knowing in a bug report, in the order in which it is printed."""
    import timm
    import torch
    import torchvision

    from .. import kernels
    from ..benchmark.machine import processor_name

    found = kernels.status()
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "inlinevit": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "torchvision": str(torchvision.__version__),
        "timm": timm.__version__,
        "system": platform.platform(),
        "cpu": f"{processor_name()}, {torch.get_num_threads()} threads",
        "gpu": ", ".join(gpus) or "none",
        "native kernels": f"{'available' if found.variant else 'not available'}: {found.reason}",
        "kernel library": str(found.library) if found.library.exists() else "none",
    }


def make_parser() -> ArgumentParser:
    """Return the parser of `inlinevit info`."""
    parser = new_parser("info", "Print versions, devices, and whether there are native CPU kernels.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def run(settings: Namespace) -> None:
    """Print them, one per line or as JSON."""
    facts = collect()
    if settings.json:
        print(json.dumps(facts, indent=2))
        return
    width = max(map(len, facts))
    for name, fact in facts.items():
        print(f"{name:{width}}  {fact}")
