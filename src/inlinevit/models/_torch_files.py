"""Files of torch.save, read without torch.load: no code runs, and no memory is allocated for data that is not there.

The pickle in a file is read by Python's own unpickler, restricted to plain values, containers and tensors; the first
other name that a file holds ends the reading. Tensors are only described by the pickle. They are read from the file
when they are asked for.
"""

import io
import math
import os
import pickle
import struct
import sys
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO, ClassVar

import torch
from torch import Tensor

ZIP_START = b"PK\x03\x04"
LOCAL_HEADER = struct.Struct("<4s5H3I2H")
ENCRYPTED = 1
# Files of torch before 1.6 begin with two pickled numbers: a magic number, and the version of the format.
LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
LEGACY_VERSION = 1001
MOST_DIMENSIONS = 16
MOST_COPIED = 2_000_000
# torch counts elements and bytes in 64 bits.
LARGEST = 2**62
# Published files have their configuration as an object of this class. It is read as a plain dictionary.
CONFIG_CLASS = "yacs.config.CfgNode"

STORAGE_DTYPES: dict[str, torch.dtype | None] = {
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
    "QInt8Storage": torch.qint8,
    "QUInt8Storage": torch.quint8,
    "QInt32Storage": torch.qint32,
    "QUInt4x2Storage": torch.quint4x2,
    "QUInt2x4Storage": torch.quint2x4,
    "UntypedStorage": None,
}
DICTS = ("builtins.dict", "collections.OrderedDict", CONFIG_CLASS)
# What is read as Opaque: tensors that are not arrays of numbers in the file, with a word for them; and values that may
# stand beside weights, or describe such tensors.
OPAQUE = {
    "torch._utils._rebuild_qtensor": "quantized",
    "torch._utils._rebuild_sparse_tensor": "sparse",
    "torch._utils._rebuild_sparse_csr_tensor": "sparse",
    "torch._utils._rebuild_meta_tensor_no_storage": "meta",
    "torch._utils._rebuild_nested_tensor": "nested",
    "torch._utils._rebuild_wrapper_subclass": "subclassed",
    "torch._utils._rebuild_device_tensor_from_numpy": "device-specific",
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": "device-specific",
    "_codecs.encode": "",
    "builtins.bytearray": "",
    "builtins.complex": "",
    "builtins.frozenset": "",
    "builtins.set": "",
    "collections.Counter": "",
    "torch.Size": "",
    "torch.Tensor": "",
    "torch.device": "",
    "torch.nn.parameter.Buffer": "",
    "torch.nn.parameter.Parameter": "",
    "torch.serialization._get_layout": "",
}


class ForbiddenName(Exception):
    """A file names something that is neither a plain value nor a tensor."""


class Damaged(Exception):
    """A file is not what torch.save writes."""


@dataclass(frozen=True, eq=False)
class StorageRecord:
    """Where the numbers of tensors are.

    Attributes:
        key: Its name in the file.
        dtype: Of its numbers; None = bytes.
        numel: How many numbers, or bytes, it has.
    """

    key: str
    dtype: torch.dtype | None
    numel: int

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.numel * (1 if self.dtype is None else self.dtype.itemsize)


@dataclass(frozen=True, eq=False)
class TensorRecord:
    """A tensor that has not been read yet; it fits into its storage.

    Attributes:
        key: Name of its storage in the file.
        dtype: Of its numbers.
        offset: Of the first one, in numbers.
        shape: Its sizes.
        stride: Its strides.
    """

    key: str
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of a contiguous copy."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class Opaque:
    """Stands for a value that is not built, and for its class.

    Attributes:
        tensor_kind: If it is a tensor, of what kind, such as "sparse".
    """

    tensor_kind: str = ""

    def __call__(self, *arguments: Any) -> "Opaque":
        return self

    def add(self, item: Any) -> None:
        """Add nothing to a set."""


@dataclass(frozen=True, eq=False)
class StorageType:
    """A class of storages, by the dtype of its numbers; None = bytes."""

    dtype: torch.dtype | None


@dataclass(frozen=True, eq=False)
class Function:
    """Stands for a function or class that a file may call; `make` is called instead."""

    make: Callable[..., Any]

    def __call__(self, *arguments: Any) -> Any:
        return self.make(*arguments)


class CheckedDict(dict[Any, Any]):
    """A dictionary whose keys are plain values or flat tuples of them: hashing nested tuples can take forever."""

    def __setitem__(self, key: Any, value: Any) -> None:
        for part in key if isinstance(key, tuple) else (key,):
            expect(part, str | bytes | int | float | None | torch.dtype | Opaque)
        super().__setitem__(key, value)


class RestrictedUnpickler(pickle._Unpickler):
    """Reads plain values, containers and tensors.

    This is Python's unpickler in Python, of which single instructions can be replaced. The one in C hashes any key,
    which overflows the stack for nested tuples, and allocates memory for any index that a file claims.

    Args:
        stream: The file, at the start of a pickle.
        find_storage: Checks storages; None = there are none.
    """

    stack: list[Any]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, stream: Any, find_storage: Callable[[StorageRecord], None] | None = None) -> None:
        super().__init__(stream, encoding="latin1")
        self.find_storage = find_storage
        # Values that were copied from one container to another.
        self.copied = 0

    def find_class(self, module: str, name: str) -> Any:
        """Return what stands for a name of the file, or raise ForbiddenName."""
        # Protocol 2 uses the name that Python 2 had.
        path = f"{'builtins' if module == '__builtin__' else module}.{name}"
        if path in DICTS:
            return Function(self.make_dict)
        if path in TENSORS:
            return Function(TENSORS[path])
        if path in OPAQUE:
            return Opaque(OPAQUE[path])
        if module in ("torch", "torch.cuda", "torch.storage") and name in STORAGE_DTYPES:
            return StorageType(STORAGE_DTYPES[name])
        constant = vars(torch).get(name) if module == "torch" else None
        if isinstance(constant, torch.dtype | torch.layout | torch.qscheme):
            return constant
        raise ForbiddenName(path)

    def get_extension(self, code: int) -> None:
        """Refuse names that other code has registered by a number."""
        raise Damaged("its pickle names something by a number")

    def persistent_load(self, pid: Any) -> StorageRecord:
        """Return the storage that is meant by ("storage", type, key, location, length[, view])."""
        if self.find_storage is None or not isinstance(pid, tuple) or not 5 <= len(pid) <= 6:
            raise Damaged("its pickle refers to something that is not in it")
        word, storage_type, key, _, numel = pid[:5]
        if word != "storage" or not is_count(numel) or any(pid[5:]):
            raise Damaged("its pickle refers to something that is not in it")
        storage = StorageRecord(str(expect(key, str | int)), expect(storage_type, StorageType).dtype, numel)
        self.find_storage(storage)
        return storage

    def make_dict(self, items: Any = ()) -> CheckedDict:
        """Return a dictionary of pairs, or of another dictionary."""
        # A short pickle could copy a long list again and again.
        self.copied += len(items)
        if self.copied > MOST_COPIED:
            raise Damaged("its pickle copies its values too often")
        made = CheckedDict()
        for key, value in items.items() if isinstance(items, dict) else expect(items, list | tuple):
            made[key] = value
        return made

    def load_build(self) -> None:
        """Drop attributes of containers and tensors, such as the versions of modules in a state dict."""
        self.stack.pop()
        expect(self.stack[-1], dict | TensorRecord | Opaque)

    def load_empty_dictionary(self) -> None:
        """Start a dictionary."""
        self.stack.append(CheckedDict())

    def load_dict(self) -> None:
        """Make a dictionary of keys and values, in turn."""
        items = self.pop_mark()
        self.stack.append(self.make_dict(list(zip(items[::2], items[1::2], strict=True))))

    def load_empty_set(self) -> None:
        """Start a set, which is not built."""
        self.stack.append(Opaque())

    def load_frozenset(self) -> None:
        """Make a set, which is not built."""
        self.pop_mark()
        self.stack.append(Opaque())

    dispatch: ClassVar[dict[int, Callable[..., None]]] = {
        **pickle._Unpickler.dispatch,
        # As bytes: the unpickler would allocate a bytearray of any length before it reads.
        ord(pickle.BYTEARRAY8): pickle._Unpickler.dispatch[ord(pickle.BINBYTES8)],
        # Classes are called like functions: what stands for them is not a class.
        ord(pickle.NEWOBJ): pickle._Unpickler.dispatch[ord(pickle.REDUCE)],
        ord(pickle.BUILD): load_build,
        ord(pickle.EMPTY_DICT): load_empty_dictionary,
        ord(pickle.DICT): load_dict,
        ord(pickle.EMPTY_SET): load_empty_set,
        ord(pickle.FROZENSET): load_frozenset,
    }


def unpickle(stream: Any, find_storage: Callable[[StorageRecord], None] | None = None) -> Any:
    """Read one pickle, up to its end."""
    try:
        return RestrictedUnpickler(stream, find_storage).load()
    # Damaged pickles fail in many ways.
    except (
        ArithmeticError, AttributeError, EOFError, LookupError, RecursionError, TypeError, ValueError,
        pickle.UnpicklingError, struct.error,
    ) as error:  # fmt: skip
        raise Damaged(f"{type(error).__name__}: {error}") from None


def expect(value: Any, kind: Any) -> Any:
    """Return a value if it is of the expected type."""
    if not isinstance(value, kind):
        raise Damaged("its pickle mixes up its values")
    return value


def is_count(value: Any) -> bool:
    """Return whether this is a number of things."""
    return type(value) is int and 0 <= value <= LARGEST


def describe_tensor(
    storage: Any, offset: Any, shape: Any, stride: Any, requires_grad: Any = None, hooks: Any = None, *more: Any
) -> TensorRecord | Opaque:
    """Describe a tensor by its place in a storage; `more` is the metadata, which marks lazily conjugated tensors."""
    return describe_typed_tensor(storage, offset, shape, stride, requires_grad, hooks, storage.dtype, *more)


def describe_typed_tensor(
    storage: Any, offset: Any, shape: Any, stride: Any, requires_grad: Any, hooks: Any, dtype: Any, *more: Any
) -> TensorRecord | Opaque:
    """Describe a tensor whose dtype is given apart from its storage."""
    storage, dtype = expect(storage, StorageRecord), expect(dtype, torch.dtype)
    shape, stride = tuple(expect(shape, tuple | list)), tuple(expect(stride, tuple | list))
    if (
        not all(map(is_count, (offset, *shape, *stride)))
        or len(shape) != len(stride)
        or len(shape) > MOST_DIMENSIONS
        or math.prod(shape) > LARGEST
    ):
        raise Damaged("a tensor has a shape that is no shape")
    if any(more):
        return Opaque("lazily conjugated or negated")
    end = offset
    if 0 not in shape:
        end += 1 + sum((length - 1) * step for length, step in zip(shape, stride, strict=True))
    if end * dtype.itemsize > storage.nbytes:
        raise Damaged("a tensor is larger than its storage")
    return TensorRecord(storage.key, dtype, offset, shape, stride)


def describe_parameter(tensor: Any, *more: Any) -> TensorRecord | Opaque:
    """Return the tensor of a parameter."""
    return expect(tensor, TensorRecord | Opaque)


def describe_from_type(function: Any, *more: Any) -> TensorRecord | Opaque:
    """Describe a tensor with attributes of its own, which are left out."""
    return describe_parameter(expect(function, Function | Opaque)(*expect(more[1], tuple)))


# The functions that torch.save names, with what is called instead.
TENSORS: dict[str, Callable[..., TensorRecord | Opaque]] = {
    "torch._utils._rebuild_tensor": describe_tensor,
    "torch._utils._rebuild_tensor_v2": describe_tensor,
    "torch._utils._rebuild_tensor_v3": describe_typed_tensor,
    "torch._utils._rebuild_parameter": describe_parameter,
    "torch._utils._rebuild_parameter_with_state": describe_parameter,
    "torch._tensor._rebuild_from_type_v2": describe_from_type,
}


class TorchFile:
    """A file that torch.save has written, opened.

    Args:
        stream: The file.

    Attributes:
        content: What it holds, with TensorRecord in place of tensors.

    Raises:
        ForbiddenName: It names what could run code.
        Damaged: It is not whole, or was not written by torch.save.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self.stream = stream
        self.size = stream.seek(0, os.SEEK_END)
        # From the key of a storage to its place in the file, its size in bytes and its checksum.
        self.places: dict[str, tuple[int, int, int | None]] = {}
        self.storages: dict[str, torch.UntypedStorage] = {}
        self.damaged_records: set[str] = set()
        stream.seek(0)
        is_zip = stream.read(len(ZIP_START)) == ZIP_START
        stream.seek(0)
        self.content = self.read_zip() if is_zip else self.read_legacy()

    def tensor(self, record: TensorRecord) -> Tensor:
        """Read the tensor that a record describes; those that share a storage in the file share it here."""
        if record.key not in self.storages:
            self.storages[record.key] = self.read_storage(record.key)
        with torch.no_grad():
            empty = torch.empty(0, dtype=record.dtype, device="cpu")
            return empty.set_(self.storages[record.key], record.offset, record.shape, record.stride)

    def read_storage(self, key: str) -> torch.UntypedStorage:
        """Read a whole storage."""
        start, size, checksum = self.places[key]
        if size == 0:
            return torch.UntypedStorage(0, device="cpu")
        self.stream.seek(start)
        numbers = bytearray(size)
        if self.stream.readinto(numbers) != size:  # type: ignore[attr-defined]
            raise Damaged("it ends within a tensor")
        if checksum is not None and zlib.crc32(numbers) != checksum:
            self.damaged_records.add(key)
        return torch.frombuffer(numbers, dtype=torch.uint8).untyped_storage()

    def read_zip(self) -> Any:
        """Read an archive: data.pkl, and a record for each storage."""
        try:
            with zipfile.ZipFile(self.stream) as archive:
                entries = archive.infolist()
        except (OSError, ValueError, EOFError, struct.error, NotImplementedError, zipfile.BadZipFile) as error:
            raise Damaged(f"its directory cannot be read: {error}") from None
        records = {entry.filename: entry for entry in entries}
        if any(name.endswith("/constants.pkl") for name in records):
            raise Damaged("it is a TorchScript program, not weights")
        if len(records) < len(entries):
            raise Damaged("it holds two records of one name")
        for entry in entries:
            # Tensors are not compressed by torch.save; compressed, a small file could fill the memory.
            if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
                raise Damaged("it holds compressed records, which torch.save does not write")
            if entry.flag_bits & ENCRYPTED:
                raise Damaged("it holds encrypted records, which torch.save does not write")
        if sum(entry.file_size for entry in entries) > self.size:
            raise Damaged("its records are larger than the file")
        mains = [name for name in records if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(mains) != 1:
            raise Damaged("it has no record called data.pkl" if not mains else "it has two records called data.pkl")
        folder = mains[0].removesuffix("data.pkl")
        order = records.get(f"{folder}byteorder")
        if order is not None and self.read_record(order).strip() != sys.byteorder.encode():
            raise Damaged("it was written on a machine with another byte order")
        for name, entry in records.items():
            if name.startswith(f"{folder}data/"):
                place = self.start_of_record(entry), entry.file_size, entry.CRC
                self.places[name.removeprefix(f"{folder}data/")] = place

        def find_storage(storage: StorageRecord) -> None:
            if storage.key not in self.places:
                raise Damaged("it lacks the record of a tensor")
            if storage.nbytes != self.places[storage.key][1]:
                raise Damaged("a tensor's record has another size than the tensor")

        return unpickle(io.BytesIO(self.read_record(records[mains[0]])), find_storage)

    def start_of_record(self, entry: zipfile.ZipInfo) -> int:
        """Return where a record begins in the file."""
        self.stream.seek(entry.header_offset)
        header = self.stream.read(LOCAL_HEADER.size)
        if len(header) != LOCAL_HEADER.size or not header.startswith(ZIP_START):
            raise Damaged("its directory does not match its records")
        *_, name_length, extra_length = LOCAL_HEADER.unpack(header)
        start = entry.header_offset + LOCAL_HEADER.size + name_length + extra_length
        if start + entry.file_size > self.size:
            raise Damaged("it ends within a record")
        return start

    def read_record(self, entry: zipfile.ZipInfo) -> bytes:
        """Read a record."""
        self.stream.seek(self.start_of_record(entry))
        return self.stream.read(entry.file_size)

    def read_legacy(self) -> Any:
        """Read a file as torch before 1.6 wrote it: four pickles, the keys of storages, the storages."""
        stream = Bounded(self.stream, self.size)
        if unpickle(stream) != LEGACY_MAGIC or unpickle(stream) != LEGACY_VERSION:
            raise Damaged("it does not begin as files of torch.save do")
        system = unpickle(stream)
        if not isinstance(system, dict) or system.get("little_endian") is not (sys.byteorder == "little"):
            raise Damaged("it was written on a machine with another byte order")
        known: dict[str, StorageRecord] = {}

        def find_storage(storage: StorageRecord) -> None:
            first = known.setdefault(storage.key, storage)
            if (first.dtype, first.numel) != (storage.dtype, storage.numel):
                raise Damaged("two tensors disagree about their storage")

        content = unpickle(stream, find_storage)
        keys = unpickle(stream)
        if not isinstance(keys, list) or set(map(type, keys)) - {str} or sorted(keys) != sorted(known):
            raise Damaged("its list of storages does not match its tensors")
        start = self.stream.tell()
        for key in keys:
            self.stream.seek(start)
            if self.stream.read(8) != struct.pack("<q", known[key].numel):
                raise Damaged("a tensor's storage has another size than the tensor")
            self.places[key] = (start + 8, known[key].nbytes, None)
            start += 8 + known[key].nbytes
            if start > self.size:
                raise Damaged("it ends within a tensor")
        return content


class Bounded:
    """A file from which no more is asked than it has: a damaged length must not allocate memory.

    Args:
        stream: The file.
        size: Its bytes.
    """

    def __init__(self, stream: BinaryIO, size: int) -> None:
        self.stream, self.size = stream, size
        self.readline = stream.readline

    def read(self, count: int) -> bytes:
        """So many bytes, or all that are left."""
        return self.stream.read(min(count, self.size - self.stream.tell()))
