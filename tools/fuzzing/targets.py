"""What is fuzzed: for each reader of files, good inputs, ways to change them, and what a valid result is.

A target is a class with `make`, from a generator to an input, and `run`, which reads an input as its users do. `run`
raises what the reader raises, and AssertionError if the reader accepts an input with a result that is not valid.
"""

import contextlib
import io
import json
import math
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any, ClassVar, Protocol

import numpy as np
import safetensors.torch
import tifffile
import torch
import yaml
from PIL import Image
from pycocotools import mask as coco_masks
from torch import Tensor

from inlinevit import recipes
from inlinevit.cli.dispatch import option_names
from inlinevit.cli.errors import report_error
from inlinevit.cli.train import make_parser
from inlinevit.data.image_source import open_regions
from inlinevit.data.images import ImageFiles
from inlinevit.data.pixels import PixelFormat
from inlinevit.data.regions import readable
from inlinevit.engine import checkpoints
from inlinevit.engine.checkpoints import CheckpointFolder, Progress
from inlinevit.engine.predictor import read_images
from inlinevit.models import InLineDeiT, load_checkpoint
from inlinevit.tasks import TASKS
from inlinevit.tasks.classification.transforms import InputSpec, evaluation_transform
from inlinevit.tasks.detection.coco import CocoSource
from inlinevit.tasks.segmentation.labels import read_labels

from . import NAMES
from .mutate import change_bytes, change_tree, write_nested

FLOATS = (torch.float16, torch.bfloat16, torch.float64)
OTHER_TYPES = (torch.int64, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn)


class Target(Protocol):
    """See above.

    Attributes:
        ending: Of its files.
        about: What it reads, in a few words.
    """

    ending: ClassVar[str]
    about: ClassVar[str]

    def good(self) -> list[bytes]:
        """Inputs that are accepted."""

    def make(self, generator: Random) -> bytes:
        """An input."""

    def run(self, path: Path) -> None:
        """Read an input."""


class Payload:
    """Unpickled without care, it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.system, (f"touch {self.marker}",)


def tiny_model(num_classes: int = 5) -> InLineDeiT:
    """A model with all that a published file has: a class token, positions, attention, a head."""
    torch.manual_seed(0)
    return InLineDeiT(img_size=16, patch_size=8, embed_dim=8, depth=1, num_heads=2, num_classes=num_classes)


class Weights:
    """load_checkpoint on files of torch.save: archives, the legacy format, and pickles within them."""

    ending: ClassVar[str] = ".pth"
    about: ClassVar[str] = "load_checkpoint, files of torch.save"
    TOKENS: ClassVar[list[bytes]] = [
        b"cos\nsystem\n",
        b"cbuiltins\neval\n",
        b"cposix\nsystem\n(X\x0c\x00\x00\x00touch markertR",
        b"ctorch._utils\n_rebuild_tensor_v2\n",
        b"ctorch._utils\n_rebuild_qtensor\n",
        b"ctorch._utils\n_rebuild_sparse_tensor\n",
        b"ctorch\nFloatStorage\n",
        b"ctorch\nUntypedStorage\n",
        b"ctorch\nfloat8_e4m3fn\n",
        b"ccollections\nOrderedDict\n",
        b"cyacs.config\nCfgNode\n",
        b"\x80\x02",
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f",
        b"J\xff\xff\xff\x7f",
        b"\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f",
        b"\x8b\xff\xff\xff\x7f",
        *(
            bytes([code])
            for code in b"()]}0123abdehijlqrstuQRcNKMJXUTCBIFLSVo.\x81\x82\x85\x86\x87\x88\x89\x8c\x8f\x90\x93\x94"
        ),
    ]

    def __init__(self, folder: Path) -> None:
        self.marker = folder / "marker"
        self.model = tiny_model()
        self.before = {name: value.clone() for name, value in self.model.state_dict().items()}

    @cached_property
    def seeds(self) -> list[bytes]:
        """Good files, and some that are refused."""
        own = tiny_model().state_dict()
        contents: list[Any] = [
            own,
            {"model": own, "epoch": 3, "config": {"lr": 0.1}},
            {"state_dict_ema": tiny_model(7).state_dict(), "state_dict": own},
            {f"module.{name}": value.half() for name, value in own.items()},
            {"model": own, "args": Payload(self.marker)},
            {"model": {"norm.weight": torch.eye(3).to_sparse()}},
        ]
        return [save(content, legacy) for content in contents for legacy in (False, True)]

    def good(self) -> list[bytes]:
        """See Target.good."""
        return self.seeds[:8]

    def make(self, generator: Random) -> bytes:
        """A file, an archive or a state dict that was changed."""
        seed = generator.choice(self.seeds)
        way = generator.random()
        if way < 0.3:
            return change_bytes(seed, generator, self.seeds, self.TOKENS)
        if way < 0.7:
            return self.change_records(generator.choice(self.seeds[::2]), generator)
        return save(change_weights(tiny_model().state_dict(), generator), generator.random() < 0.3)

    def change_records(self, archive: bytes, generator: Random) -> bytes:
        """An archive with changed records."""
        with zipfile.ZipFile(io.BytesIO(archive)) as opened:
            records = {name: opened.read(name) for name in opened.namelist()}
        name = generator.choice([key for key in records if key.endswith("data.pkl")] * 8 + list(records))
        records[name] = change_bytes(records[name], generator, list(records.values()), self.TOKENS)
        if generator.random() < 0.1:
            del records[generator.choice(list(records))]
        compression = zipfile.ZIP_DEFLATED if generator.random() < 0.05 else zipfile.ZIP_STORED
        return pack(records, compression)

    def run(self, path: Path) -> None:
        """Load it into a model, which is left as it was unless all of it fits."""
        try:
            load_checkpoint(self.model, path)
        except BaseException:
            assert same(self.model.state_dict(), self.before), "a refused file has changed the model"
            raise
        after = self.model.state_dict()
        assert {name: value.shape for name, value in after.items()} == {
            name: value.shape for name, value in self.before.items()
        }
        self.model.load_state_dict(self.before)


class Safetensors(Weights):
    """load_checkpoint on safetensors."""

    ending: ClassVar[str] = ".safetensors"
    about: ClassVar[str] = "load_checkpoint, safetensors"
    TOKENS: ClassVar[list[bytes]] = [
        *(f'"{kind}"'.encode() for kind in ("F32", "F64", "F16", "BF16", "I64", "U8", "BOOL", "F8_E4M3", "C64", "F4")),
        b'"data_offsets":[0,0]',
        b'"shape":[]',
        b'"shape":[18446744073709551615,2]',
        b'"__metadata__":{}',
        b'"head.weight"',
    ]

    @cached_property
    def seeds(self) -> list[bytes]:
        """Good files."""
        own = tiny_model().state_dict()
        return [
            safetensors.torch.save(own),
            safetensors.torch.save({name: value.half() for name, value in own.items()}),
        ]

    def make(self, generator: Random) -> bytes:
        """A file, a header or a state dict that was changed."""
        way = generator.random()
        if way < 0.3:
            return change_bytes(generator.choice(self.seeds), generator, self.seeds, self.TOKENS)
        if way < 0.7:
            return change_header(generator.choice(self.seeds), generator, self.TOKENS)
        changed = change_weights(tiny_model().state_dict(), generator)
        dense = {str(name): value for name, value in changed.items() if isinstance(value, Tensor) and is_plain(value)}
        return safetensors.torch.save({name: value.clone().contiguous() for name, value in dense.items()})


def save(content: Any, legacy: bool = False) -> bytes:
    """What torch.save writes."""
    stream = io.BytesIO()
    torch.save(content, stream, _use_new_zipfile_serialization=not legacy)
    return stream.getvalue()


def change_header(content: bytes, generator: Random, tokens: list[bytes]) -> bytes:
    """A safetensors file whose header, in JSON, was changed; its length fits again, mostly."""
    (length,) = struct.unpack("<Q", content[:8])
    header = content[8 : 8 + length]
    if generator.random() < 0.6:
        changed = write_nested(json.dumps(change_tree(json.loads(header), generator))).encode()
    else:
        changed = change_bytes(header, generator, [header], tokens)
    stated = len(changed) if generator.random() < 0.9 else generator.choice((0, 1, 2**31, 2**63))
    return struct.pack("<Q", stated) + changed + content[8 + length :]


def is_plain(value: Tensor) -> bool:
    """Whether safetensors can hold a tensor."""
    return value.layout is torch.strided and not value.is_quantized and not value.is_meta and value.numel() < 10**6


TENSOR_CHANGES: tuple[Callable[[Tensor, Random], Any], ...] = (
    lambda value, generator: value.reshape(-1)[: generator.randrange(5)],
    lambda value, generator: value.sum(),
    lambda value, generator: value[:0],
    lambda value, generator: value[None],
    lambda value, generator: torch.cat([value, value]),
    lambda value, generator: value.to(generator.choice(OTHER_TYPES)),
    lambda value, generator: value.to(generator.choice(FLOATS)),
    lambda value, generator: value.to_sparse(),
    lambda value, generator: value.to("meta"),
    lambda value, generator: torch.ones(1).expand(10 ** generator.randrange(2, 13)),
    lambda value, generator: torch.ones(1, 1, 1).expand(1, 1 + generator.randrange(10**6) ** 2, 8),
    lambda value, generator: value * float("nan"),
    lambda value, generator: value.t(),
    lambda value, generator: generator.choice([None, 3, "x", [value], {"a": value}, b"x", (1, 2)]),
)


def change_weights(weights: dict[str, Tensor], generator: Random) -> dict[Any, Any]:
    """Weights of which some are missing, of other shapes or types, or no weights at all."""
    changed: dict[Any, Any] = dict(weights)
    for _ in range(generator.choice((1, 1, 2, 3))):
        name = generator.choice([*changed, "head.weight", "head.bias", "stages.0.pos_embed"])
        value = changed.get(name)
        value = value if isinstance(value, Tensor) and is_plain(value) else torch.ones(2, 3)
        way = generator.randrange(len(TENSOR_CHANGES) + 3)
        if way < len(TENSOR_CHANGES):
            # Not every change can be made to every tensor.
            with contextlib.suppress(RuntimeError, IndexError):
                changed[name] = TENSOR_CHANGES[way](value, generator)
        elif way == len(TENSOR_CHANGES):
            changed.pop(name, None)
        elif way == len(TENSOR_CHANGES) + 1:
            changed[generator.choice(["x" * 5000, "module.a", "a\nb", "", 3, None, ("a", 1), f"{name}#1"])] = value
        else:
            return {generator.choice(["model", "state_dict", "other"]): changed, "more": changed.get(name)}
    return changed


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    """Whether weights are equal, bit by bit."""
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def pack(files: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    """Files as an archive, the same each time."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name), content, compression)
    return stream.getvalue()


class Checkpoint:
    """find_damage, read_manifest, read_weights and read_state on the folder of a checkpoint, as one archive."""

    ending: ClassVar[str] = ".zip"
    about: ClassVar[str] = "checkpoints of a run"

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "checkpoint"
        self.progress = Progress(
            step=12, evaluated_step=8, metrics={"top1": 50.0}, best=50.0, best_step=8, steps_per_epoch=4
        )
        self.files = self.write(folder / "written")

    def write(self, folder: Path) -> dict[str, bytes]:
        """The files of a checkpoint, as a run writes them."""
        weights = {name: value.clone() for name, value in tiny_model().state_dict().items()}
        state = {"optimizer": {"state": {0: {"step": 3.0, "exp_avg": torch.ones(4)}}, "param_groups": [{"lr": 0.1}]}}
        packed = {"model.safetensors": checkpoints.pack_weights(weights), **checkpoints.pack_state(state)}
        path = CheckpointFolder(folder).save(self.progress, packed)
        CheckpointFolder(folder).save_evaluation(self.progress)
        return {file.name: file.read_bytes() for file in sorted(path.iterdir())}

    def good(self) -> list[bytes]:
        """See Target.good."""
        return [pack(self.files)]

    def make(self, generator: Random) -> bytes:
        """A checkpoint in which files were changed, most often together with their entries in the manifest."""
        files = dict(self.files)
        names = [name for name in files if name != checkpoints.MANIFEST]
        for name in generator.sample(names, generator.choice((0, 1, 1, 1, 2))):
            files[name] = self.change(name, files[name], generator)
        if generator.random() < 0.8:
            entries = {name: checkpoints.entry_of(files[name]) for name in names}
            files[checkpoints.MANIFEST] = checkpoints.manifest_bytes(self.progress, entries)
        if generator.random() < 0.25:
            files[checkpoints.MANIFEST] = self.change(checkpoints.MANIFEST, files[checkpoints.MANIFEST], generator)
        if generator.random() < 0.1:
            del files[generator.choice(list(files))]
        return pack(files)

    def change(self, name: str, content: bytes, generator: Random) -> bytes:
        """The content of a file, changed as its format allows."""
        if generator.random() < 0.3:
            return change_bytes(content, generator, list(self.files.values()), [b"null", b"NaN", b'"step"', b"[" * 900])
        if name.endswith(".safetensors"):
            return change_header(content, generator, Safetensors.TOKENS)
        return write_nested(json.dumps(change_tree(json.loads(content), generator))).encode()

    def run(self, path: Path) -> None:
        """Everything that is read on resuming."""
        self.folder.mkdir(exist_ok=True)
        for file in self.folder.iterdir():
            file.unlink()
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                (self.folder / Path(name).name).write_bytes(archive.read(name))
        problem = checkpoints.find_damage(self.folder)
        if problem is not None:
            raise ValueError(problem)
        progress = checkpoints.read_manifest(self.folder)[0]
        assert progress.step >= 0
        assert math.isfinite(progress.loss_sum)
        weights = checkpoints.read_weights(self.folder, "model")
        assert all(isinstance(value, Tensor) for value in weights.values())
        checkpoints.read_state(self.folder)


class Yaml:
    """Files of YAML: changed as text, as structures, and with what YAML is feared for."""

    ending: ClassVar[str] = ".yaml"
    about: ClassVar[str] = ""
    TOKENS: ClassVar[list[bytes]] = [
        b'!!python/object/apply:os.system ["touch marker"]',
        b"!!python/name:os.system",
        b"!!binary ",
        b"!!timestamp ",
        b"!!float ",
        b"!!int ",
        b"!!set ",
        b"!!omap ",
        b"&a [*a, *a]",
        b"&a ",
        b"*a",
        b"<<: *a",
        b"? ",
        b": ",
        b"- ",
        b"\n---\n",
        b"%YAML 9.9\n",
        b"[" * 300,
        b"{a: " * 300,
        b".inf",
        b".nan",
        b"2001-99-99",
        b"0x",
        b"1_0:60:60",
        b"'",
        b"|\n",
        b"\t",
        b"\xff\xfe",
        b"\xef\xbb\xbf",
        b"null",
        b"~",
    ]
    LAUGHS = b"a: &a [x, x]\n" + b"".join(
        b"%c: &%c [%s]\n" % (98 + i, 98 + i, b", ".join([b"*%c" % (97 + i)] * 9)) for i in range(12)
    )

    def __init__(self, seeds: list[bytes]) -> None:
        self.seeds = seeds
        self.trees = [yaml.safe_load(seed) for seed in seeds]

    def good(self) -> list[bytes]:
        """See Target.good."""
        return self.seeds

    def make(self, generator: Random) -> bytes:
        """A text or a structure that was changed."""
        way = generator.random()
        if way < 0.45:
            return change_bytes(generator.choice(self.seeds), generator, self.seeds, self.TOKENS)
        if way < 0.47:
            return self.LAUGHS + generator.choice(self.seeds)
        changed = change_tree(generator.choice(self.trees), generator)
        return write_nested(dump(changed, generator)).encode(errors="replace")


def dump(tree: Any, generator: Random) -> str:
    """A structure as YAML in one of its forms; JSON is one of them."""
    if generator.random() < 0.3:
        return json.dumps(tree)
    return yaml.safe_dump(tree, allow_unicode=True, default_flow_style=generator.choice((None, False, True)))


class Labels(Yaml):
    """read_labels on the YAML of classes and values."""

    about: ClassVar[str] = "label YAML"

    def __init__(self, folder: Path) -> None:
        super().__init__(
            [
                b"ignored: [0, 255]\nclasses:\n  - name: road\n    values: [7, 8]\n    colour: [128, 64, 128]\n"
                b"  - {name: sky, values: [9]}\n",
                b"classes: [{name: a, values: [0]}, {name: b, values: [1]}, {name: 'no', values: [65535]}]\n",
            ]
        )

    def run(self, path: Path) -> None:
        """Read the classes, and translate with them."""
        labels = read_labels(path)
        values = [value for one in labels.classes for value in one.values]
        indices = labels.to_indices(np.array([values]))
        assert set(indices.flatten().tolist()) == set(range(len(labels.classes)))
        assert labels.to_values(indices).shape == (1, len(values))


class Recipe(Yaml):
    """`--config FILE` of the training commands, from the file to the sentence that the user sees."""

    about: ClassVar[str] = "recipe YAML (--config)"

    def __init__(self, folder: Path) -> None:
        names = ("inline_swin_tiny", "inline_deit_tiny", "embedded", "cifar10")
        super().__init__([(recipes.HOME / "classification" / f"{name}.yaml").read_bytes() for name in names])
        self.parser = make_parser(TASKS["classification"])

    def run(self, path: Path) -> None:
        """Parse it as `inlinevit train --config FILE` does."""
        arguments = ["--config", str(path)]
        try:
            self.parser.instantiate(self.parser.parse_args(arguments))
        except Exception as error:
            said = io.StringIO()
            with contextlib.redirect_stderr(said):
                report_error(error, option_names(self.parser))
            lines = said.getvalue().splitlines()
            # Values that the user has written are repeated.
            raise ValueError("\n".join(line[:1000] for line in lines)) from None


def runs(size: list[int], counts: list[int] | str) -> dict[str, Any]:
    """A mask as COCO's run lengths."""
    return {"size": size, "counts": counts}


class Coco:
    """CocoSource on a file of annotations: all that training and evaluation take from it."""

    ending: ClassVar[str] = ".json"
    about: ClassVar[str] = "COCO JSON"
    TOKENS: ClassVar[list[bytes]] = [
        *(b"NaN", b"Infinity", b"1e999", b"null", b"true", b"[" * 900, b'"\\ud800"', b"9" * 5000, b'"counts"')
    ]

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "images"
        self.folder.mkdir(exist_ok=True)
        Image.new("RGB", (8, 6), "red").save(self.folder / "a.png")
        Image.new("RGB", (5, 9), "blue").save(self.folder / "b.png")
        polygon = [1, 1, 6, 1, 6, 4, 1, 4]
        compressed = coco_masks.encode(np.asfortranarray(np.eye(9, 5, dtype=np.uint8)))["counts"].decode()
        common = {"iscrowd": 0, "area": 15.0, "bbox": [1, 1, 5, 3]}
        self.tree = {
            "images": [
                {"id": 1, "file_name": "a.png", "width": 8, "height": 6},
                {"id": 2, "file_name": "b.png", "width": 5, "height": 9},
            ],
            "categories": [{"id": 3, "name": "cat"}, {"id": 7, "name": "dog"}],
            "annotations": [
                {"id": 1, "image_id": 1, "category_id": 3, "segmentation": [polygon], **common},
                {
                    "id": 2,
                    "image_id": 1,
                    "category_id": 7,
                    **common,
                    "segmentation": {"size": [6, 8], "counts": [8, 20, 20]},
                },
                {
                    "id": 3,
                    "image_id": 2,
                    "category_id": 3,
                    **common,
                    "segmentation": {"size": [9, 5], "counts": compressed},
                },
                {
                    "id": 4,
                    "image_id": 2,
                    "category_id": 3,
                    **common,
                    "iscrowd": 1,
                    "segmentation": {"size": [9, 5], "counts": [0, 45]},
                },
            ],
        }

    def good(self) -> list[bytes]:
        """See Target.good."""
        return [json.dumps(self.tree).encode()]

    def make(self, generator: Random) -> bytes:
        """A text or a structure that was changed."""
        text = json.dumps(self.tree).encode()
        if generator.random() < 0.25:
            tokens = [
                b"NaN",
                b"Infinity",
                b"1e999",
                b"null",
                b"true",
                b"[" * 900,
                b'"\\ud800"',
                b"9" * 5000,
                b'"counts"',
            ]
            return change_bytes(text, generator, [text], tokens)
        return json.dumps(change_tree(self.tree, generator)).encode()

    def run(self, path: Path) -> None:
        """Open it, read all images and objects, and make what evaluation needs."""
        source = CocoSource(path, self.folder)
        for index in range(len(source)):
            image, target = source.read_image(index), source.read_target(index)
            count = len(target["labels"])
            assert target["boxes"].shape == (count, 4)
            assert target["boxes"].isfinite().all()
            assert target["masks"].shape == (count, image.height, image.width)
            assert target["masks"].max() <= 1 if count else True
        json.dumps(source.ground_truth())


class Images:
    """The images of training and prediction, from a file to a tensor."""

    ending: ClassVar[str] = ".jpg"
    about: ClassVar[str] = "image files"
    TOKENS: ClassVar[list[bytes]] = [
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(marker) (w) file\n",
        b"\xff\xd8\xff",
        b"\x89PNG\r\n\x1a\n",
        b"IHDR",
        b"iCCP",
        b"zTXt",
        b"eXIf",
        b"acTL",
        b"Exif\x00\x00",
        b"II*\x00",
        b"MM\x00*",
        b"RIFF\xff\xff\xff\xffWEBP",
        b"GIF89a",
        b"\xff\xe2\xff\xffICC_PROFILE\x00",
        b"P6 99999 99999 255\n",
        b"BM",
    ]

    def __init__(self, folder: Path) -> None:
        mean, std = (0.5, 0.5, 0.5), (0.2, 0.2, 0.2)
        self.spec = InputSpec(size=16, mean=mean, std=std, interpolation="bicubic", crop_pct=1.0, crop_mode="center")
        self.transform = evaluation_transform(self.spec)

    @cached_property
    def seeds(self) -> list[bytes]:
        """Small images in all formats, modes and compressions that Pillow can write here."""
        generator = np.random.default_rng(0)
        colour = Image.fromarray(generator.integers(0, 256, (12, 9, 3), dtype=np.uint8))
        modes = {mode: colour.convert(mode) for mode in ("RGB", "L", "P", "1", "RGBA", "CMYK", "LA", "YCbCr", "I", "F")}
        modes["I;16"] = Image.fromarray(generator.integers(0, 65536, (12, 9), dtype=np.uint16))
        exif = Image.Exif()
        exif[0x0112] = 6
        frames = [colour.rotate(90 * turn) for turn in range(3)]
        compressions = ("raw", "tiff_lzw", "tiff_deflate", "packbits", "jpeg", "group4")
        ways: list[tuple[str, dict[str, Any]]] = [
            ("PNG", {}),
            ("JPEG", {"exif": exif}),
            ("JPEG", {"progressive": True, "icc_profile": b"icc" * 50}),
            ("WEBP", {"lossless": True}),
            ("WEBP", {"save_all": True, "append_images": frames}),
            *(("TIFF", {"compression": name}) for name in compressions),
            ("BMP", {}),
            ("GIF", {"save_all": True, "append_images": frames}),
            ("PPM", {}),
            ("EPS", {}),
            ("PDF", {}),
            ("ICO", {}),
            ("TGA", {}),
            ("PCX", {}),
            ("SGI", {}),
            ("JPEG2000", {}),
            ("AVIF", {}),
            ("DDS", {}),
            ("IM", {}),
            ("SPIDER", {}),
        ]
        found = []
        for name, options in ways:
            for image in modes.values():
                stream = io.BytesIO()
                # Few formats hold all modes.
                with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RuntimeError, AttributeError):
                    image.save(stream, name, **options)
                    found.append(stream.getvalue())
        return found

    def good(self) -> list[bytes]:
        """See Target.good."""
        return [seed for seed in self.seeds if seed.startswith((b"\x89PNG", b"\xff\xd8", b"RIFF", b"GIF", b"BM"))]

    def make(self, generator: Random) -> bytes:
        """An image that was changed."""
        return change_bytes(generator.choice(self.seeds), generator, self.seeds, self.TOKENS)

    def run(self, path: Path) -> None:
        """Read it as prediction does; an image that cannot be used comes with one line that says why."""
        for mode, channels in (("RGB", 3), ("L", 1)):
            (read,) = read_images(ImageFiles([str(path)]), PixelFormat(channels))
            image = read.image
            if image is None:
                raise ValueError(read.error)
            assert image.mode == mode
            if mode == "RGB":
                tensor = self.transform(image)
                assert tensor.shape == (3, 16, 16)
                assert tensor.isfinite().all()


class Regions:
    """Images that are streamed, from a file to regions of all levels."""

    ending: ClassVar[str] = ".tif"
    about: ClassVar[str] = "files that are read by regions"
    TOKENS: ClassVar[list[bytes]] = [
        b"II*\x00",
        b"MM\x00*",
        b"II+\x00\x08\x00\x00\x00",
        b"\x93NUMPY\x01\x00",
        b"'descr': '|O'",
        b"'fortran_order': True",
        b"'shape': (99999999, 99999, 3)",
        b"\x00\x01\x03\x00",
        b"<OME xmlns=",
        b"Aperio Image|MPP = 0.5",
    ]
    # Pixels that are decoded together, and the side of what is read.
    MAX_PIXELS, SIDE = 2**16, 40

    def __init__(self, folder: Path) -> None:
        pass

    @cached_property
    def seeds(self) -> list[bytes]:
        """Small TIFF files of all layouts, arrays, and a format that is decoded as a whole."""
        generator = np.random.default_rng(0)
        colour = generator.integers(0, 256, (50, 70, 3), dtype=np.uint8)
        grey, bands = colour[..., 0].astype(np.float32), generator.integers(0, 4096, (50, 70, 5), dtype=np.uint16)
        found = []
        for values, photometric in ((colour, "rgb"), (grey, "minisblack"), (bands, "minisblack")):
            # How the file is written, and how its pages are.
            ways: list[tuple[dict[str, Any], dict[str, Any]]] = [
                ({}, {"tile": (16, 32)}),
                ({}, {"tile": (16, 16), "compression": "zlib", "predictor": values.dtype.kind != "f"}),
                ({}, {"rowsperstrip": 7, "compression": "lzw"}),
                ({"bigtiff": True}, {"rowsperstrip": 50}),
                ({"byteorder": ">"}, {"tile": (32, 32), "planarconfig": "separate"} if values.ndim == 3 else {}),
            ]
            for form, options in ways:
                stream = io.BytesIO()
                with tifffile.TiffWriter(stream, **form) as file:
                    file.write(values, photometric=photometric, subifds=1, **options)
                    file.write(values[::2, ::2], photometric=photometric, subfiletype=1, **options)
                found.append(stream.getvalue())
            stream = io.BytesIO()
            np.save(stream, values)
            found.append(stream.getvalue())
        stream = io.BytesIO()
        Image.fromarray(colour).save(stream, "PNG")
        return [*found, stream.getvalue()]

    def good(self) -> list[bytes]:
        """See Target.good."""
        return self.seeds

    def make(self, generator: Random) -> bytes:
        """A file that was changed."""
        return change_bytes(generator.choice(self.seeds), generator, self.seeds, self.TOKENS)

    def run(self, path: Path) -> None:
        """Read the first and the last pixels of each level."""
        with open_regions(path, self.MAX_PIXELS) as reader, readable(path.name):
            for level, (width, height) in enumerate(reader.level_dimensions):
                size = min(width, self.SIDE), min(height, self.SIDE)
                scale = reader.level_downsamples[level]
                for corner in ((0, 0), (int((width - size[0]) * scale), int((height - size[1]) * scale))):
                    region = reader.read_region(corner, level, size)
                    assert region.shape == (size[1], size[0], reader.kind.bands)


TARGETS: dict[str, Callable[[Path], Target]] = {
    "weights": Weights,
    "safetensors": Safetensors,
    "checkpoint": Checkpoint,
    "labels": Labels,
    "recipe": Recipe,
    "coco": Coco,
    "images": Images,
    "regions": Regions,
}


assert tuple(TARGETS) == NAMES


def dangerous_pickle(marker: Path) -> bytes:
    """A pickle that makes a file when it is read without care: proof that the watch sees something."""
    return pickle.dumps(Payload(marker))
