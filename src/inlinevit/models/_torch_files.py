"""What torch.save has written, read without torch.load: nothing is called that a file names, and nothing is allocated
that the file does not hold.

A pickle is a program for a small machine. This one knows plain values, containers and tensors; of everything else a
file could name, the first name ends the reading. Tensors are described while the program runs, and read from the file
only when they are asked for.
"""

import io
import math
import os
import pickletools
import struct
import sys
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch
from torch import Tensor

ZIP_START = b"PK\x03\x04"
# What files of torch before 1.6 begin with, as two pickled numbers: a mark, and the version of the format.
LEGACY_MARK = 0x1950A86A20F9469CFC6C
LEGACY_VERSION = 1001
LOCAL_HEADER = struct.Struct("<4s5H3I2H")
ENCRYPTED = 1
MOST_DIMENSIONS = 16
MOST_COPIED = 2_000_000
# torch counts elements and bytes in 64 bits.
LARGEST = 2**62
# Published files carry their configuration as an object of this class. It is read as a plain dictionary.
CONFIG_CLASS = "yacs.config.CfgNode"

DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
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
# Tensors that have no values of their own in a file, or not as they are, by what makes them.
UNUSUAL_TENSORS = {
    "torch._utils._rebuild_qtensor": "quantized",
    "torch._utils._rebuild_sparse_tensor": "sparse",
    "torch._utils._rebuild_sparse_csr_tensor": "sparse",
    "torch._utils._rebuild_meta_tensor_no_storage": "meta",
    "torch._utils._rebuild_nested_tensor": "nested",
    "torch._utils._rebuild_wrapper_subclass": "subclassed",
    "torch._utils._rebuild_device_tensor_from_numpy": "device-specific",
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": "device-specific",
}
# Names of torch that only stand among the arguments of such tensors.
MARKERS = (
    "torch.Tensor",
    "torch.nn.parameter.Parameter",
    "torch.nn.parameter.Buffer",
    "torch.serialization._get_layout",
    "torch.device",
    "torch.per_tensor_affine",
    "torch.per_tensor_symmetric",
    "torch.per_channel_affine",
    "torch.per_channel_symmetric",
    "torch.per_channel_affine_float_qparams",
    "torch.strided",
    "torch.sparse_coo",
    "torch.sparse_csr",
    "torch.sparse_csc",
    "torch.sparse_bsr",
    "torch.sparse_bsc",
    "torch.jagged",
)


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
        start: Where a part of it begins, in numbers; the whole begins at 0.
    """

    key: str
    dtype: torch.dtype | None
    numel: int
    start: int = 0

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.numel * (1 if self.dtype is None else self.dtype.itemsize)


@dataclass(frozen=True, eq=False)
class TensorRecord:
    """A tensor that has not been read yet; it fits into its storage.

    Attributes:
        storage: Where its numbers are.
        dtype: Of its numbers.
        offset: Of the first one, in numbers.
        shape: Its sizes.
        stride: Its strides.
    """

    storage: StorageRecord
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its size if every number stood alone, as in a copy of it."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class UnusualTensor:
    """A tensor that is not an array of numbers in the file.

    Attributes:
        kind: In a word.
    """

    kind: str


@dataclass(frozen=True, eq=False)
class Marker:
    """A name of torch's that stands for nothing here."""

    name: str


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
        stream.seek(0)
        # From the key of a storage to its place in the file, its size in bytes and its checksum.
        self.places: dict[str, tuple[int, int, int | None]] = {}
        self._storages: dict[tuple[str, int, int], torch.UntypedStorage] = {}
        self.damaged_records: set[str] = set()
        start = stream.read(len(ZIP_START))
        stream.seek(0)
        self.content = self._read_zip() if start == ZIP_START else self._read_legacy()

    def tensor(self, record: TensorRecord) -> Tensor:
        """The tensor that a record describes; those that share a storage in the file share it here."""
        storage = record.storage
        key = storage.key, storage.start, storage.nbytes
        if key not in self._storages:
            self._storages[key] = self._read_storage(storage)
        with torch.no_grad():
            empty = torch.empty(0, dtype=record.dtype, device="cpu")
            return empty.set_(self._storages[key], record.offset, record.shape, record.stride)

    def _read_storage(self, storage: StorageRecord) -> torch.UntypedStorage:
        place, size, checksum = self.places[storage.key]
        if storage.nbytes == 0:
            return torch.UntypedStorage(0, device="cpu")
        self.stream.seek(place + storage.start * (1 if storage.dtype is None else storage.dtype.itemsize))
        numbers = bytearray(storage.nbytes)
        if self.stream.readinto(numbers) != len(numbers):  # type: ignore[attr-defined]
            raise Damaged("it ends within a tensor")
        if checksum is not None and storage.nbytes == size and zlib.crc32(numbers) != checksum:
            self.damaged_records.add(storage.key)
        return torch.frombuffer(numbers, dtype=torch.uint8).untyped_storage()

    # --------------------------------------------------------------------------------------------------- zip archives

    def _read_zip(self) -> Any:
        """Read an archive: data.pkl, and a record for each storage."""
        try:
            with zipfile.ZipFile(self.stream) as archive:
                entries = archive.infolist()
        except (OSError, ValueError, EOFError, struct.error, NotImplementedError, zipfile.BadZipFile) as error:
            raise Damaged(f"its directory cannot be read: {error}") from None
        if any(entry.filename.endswith("/constants.pkl") for entry in entries):
            raise Damaged("it is a TorchScript program, not weights")
        records: dict[str, zipfile.ZipInfo] = {}
        for entry in entries:
            if entry.filename in records:
                raise Damaged("it holds two records of one name")
            # Tensors are not compressed by torch.save; compressed, a small file could fill the memory.
            if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
                raise Damaged("it holds compressed records, which torch.save does not write")
            if entry.flag_bits & ENCRYPTED:
                raise Damaged("it holds encrypted records, which torch.save does not write")
            records[entry.filename] = entry
        if sum(entry.file_size for entry in entries) > self.size:
            raise Damaged("its records are larger than the file")
        mains = [name for name in records if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(mains) != 1:
            raise Damaged("it has no record called data.pkl" if not mains else "it has two records called data.pkl")
        folder = mains[0].removesuffix("data.pkl")
        order = f"{folder}byteorder"
        if order in records and self._record(records[order]).strip() != sys.byteorder.encode():
            raise Damaged("it was written on a machine with another byte order")
        for name, entry in records.items():
            if name.startswith(f"{folder}data/"):
                key = name.removeprefix(f"{folder}data/")
                self.places[key] = (self._start_of(entry), entry.file_size, entry.CRC)
        return self._run(io.BytesIO(self._record(records[mains[0]])), self._zip_storage)

    def _start_of(self, entry: zipfile.ZipInfo) -> int:
        """Where a record begins in the file."""
        self.stream.seek(entry.header_offset)
        header = self.stream.read(LOCAL_HEADER.size)
        if len(header) != LOCAL_HEADER.size or not header.startswith(ZIP_START):
            raise Damaged("its directory does not match its records")
        *_, name_length, extra_length = LOCAL_HEADER.unpack(header)
        start = entry.header_offset + LOCAL_HEADER.size + name_length + extra_length
        if start + entry.file_size > self.size:
            raise Damaged("it ends within a record")
        return start

    def _record(self, entry: zipfile.ZipInfo) -> bytes:
        self.stream.seek(self._start_of(entry))
        return self.stream.read(entry.file_size)

    def _zip_storage(self, storage: StorageRecord) -> StorageRecord:
        """Refuse a storage that is not in the archive, or larger than its record."""
        if storage.key not in self.places:
            raise Damaged("it lacks the record of a tensor")
        if storage.nbytes != self.places[storage.key][1]:
            raise Damaged("a tensor's record has another size than the tensor")
        return storage

    # -------------------------------------------------------------------------------------------------- legacy files

    def _read_legacy(self) -> Any:
        """Read a file as torch before 1.6 wrote it: four pickles, the keys of storages, the storages."""
        stream = Bounded(self.stream, self.size)
        if self._run(stream) != LEGACY_MARK or self._run(stream) != LEGACY_VERSION:
            raise Damaged("it does not begin as files of torch.save do")
        system = self._run(stream)
        if not isinstance(system, dict) or system.get("little_endian") is not (sys.byteorder == "little"):
            raise Damaged("it was written on a machine with another byte order")
        known: dict[str, StorageRecord] = {}

        def whole_storage(storage: StorageRecord) -> StorageRecord:
            first = known.setdefault(storage.key, storage)
            if (first.dtype, first.numel) != (storage.dtype, storage.numel):
                raise Damaged("two tensors disagree about their storage")
            return storage

        content = self._run(stream, whole_storage)
        keys = self._run(stream)
        if not isinstance(keys, list) or set(map(type, keys)) - {str} or sorted(keys) != sorted(known):
            raise Damaged("its list of storages does not match its tensors")
        place = self.stream.tell()
        for key in keys:
            self.stream.seek(place)
            length = self.stream.read(8)
            if length != struct.pack("<q", known[key].numel):
                raise Damaged("a tensor's storage has another size than the tensor")
            self.places[key] = (place + 8, known[key].nbytes, None)
            place += 8 + known[key].nbytes
            if place > self.size:
                raise Damaged("it ends within a tensor")
        return content

    def _run(self, stream: Any, find_storage: Callable[[StorageRecord], StorageRecord] | None = None) -> Any:
        """Run one pickle, up to its end."""
        try:
            return PickleMachine(find_storage).run(stream)
        # Damaged programs fail in many ways; none of these comes from outside of the machine.
        except (ValueError, TypeError, KeyError, IndexError, OverflowError, struct.error, EOFError) as error:
            raise Damaged(f"{type(error).__name__}: {error}") from None


class Bounded:
    """A file from which no more is asked than it has: a damaged length must not allocate memory.

    Args:
        stream: The file.
        size: Its bytes.
    """

    def __init__(self, stream: BinaryIO, size: int) -> None:
        self.stream, self.size = stream, size
        self.readline, self.tell = stream.readline, stream.tell

    def read(self, count: int) -> bytes:
        """So many bytes, or all that are left."""
        return self.stream.read(min(count, self.size - self.stream.tell()))


class PickleMachine:
    """Runs the program of a pickle as far as plain values, containers and tensors go.

    Args:
        find_storage: Checks storages; None = there are none.
    """

    def __init__(self, find_storage: Callable[[StorageRecord], StorageRecord] | None) -> None:
        self.find_storage = find_storage
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        # Values that were copied from one container to another.
        self.copied = 0

    def run(self, stream: Any) -> Any:
        """What the program leaves."""
        for opcode, argument, _ in pickletools.genops(stream):
            if opcode.name == "STOP":
                break
            self.step(opcode.name, argument)
        if len(self.stack) != 1 or self.marks:
            raise Damaged("its pickle does not end with one object")
        return self.stack[0]

    def step(self, name: str, argument: Any) -> None:
        """One instruction."""
        stack = self.stack
        match name:
            case "PROTO" | "FRAME":
                pass
            case "MARK":
                self.marks.append(len(stack))
            case "POP":
                self.pop()
            case "POP_MARK":
                self.pop_to_mark()
            case "DUP":
                stack.append(self.top())
            case "NONE":
                stack.append(None)
            case "NEWTRUE":
                stack.append(True)
            case "NEWFALSE":
                stack.append(False)
            case (
                "INT" | "BININT" | "BININT1" | "BININT2" | "LONG" | "LONG1" | "LONG4" | "FLOAT" | "BINFLOAT"
                | "STRING" | "BINSTRING" | "SHORT_BINSTRING" | "UNICODE" | "BINUNICODE" | "SHORT_BINUNICODE"
                | "BINUNICODE8" | "BINBYTES" | "SHORT_BINBYTES" | "BINBYTES8" | "BYTEARRAY8"
            ):  # fmt: skip
                stack.append(argument)
            case "EMPTY_TUPLE":
                stack.append(())
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                count = int(name[-1])
                stack.append(tuple(reversed([self.pop() for _ in range(count)])))
            case "TUPLE":
                stack.append(tuple(self.pop_to_mark()))
            case "EMPTY_LIST":
                stack.append([])
            case "LIST":
                stack.append(self.pop_to_mark())
            case "APPEND":
                self.extend([self.pop()])
            case "APPENDS":
                self.extend(self.pop_to_mark())
            case "EMPTY_DICT":
                stack.append({})
            case "DICT":
                stack.append(as_dict(self.pop_to_mark()))
            case "SETITEM":
                value, key = self.pop(), self.pop()
                self.update([key, value])
            case "SETITEMS":
                self.update(self.pop_to_mark())
            case "EMPTY_SET":
                stack.append(set())
            case "ADDITEMS":
                items = self.pop_to_mark()
                kind(self.top(), set).update(map(checked_key, items))
            case "FROZENSET":
                stack.append(frozenset(map(checked_key, self.pop_to_mark())))
            case "PUT" | "BINPUT" | "LONG_BINPUT":
                self.memo[argument] = self.top()
            case "MEMOIZE":
                self.memo[len(self.memo)] = self.top()
            case "GET" | "BINGET" | "LONG_BINGET":
                stack.append(self.memo[argument])
            case "GLOBAL":
                stack.append(find_name(argument.replace(" ", ".", 1)))
            case "STACK_GLOBAL":
                last, module = kind(self.pop(), str), kind(self.pop(), str)
                stack.append(find_name(f"{module}.{last}"))
            case "REDUCE" | "NEWOBJ":
                arguments = kind(self.pop(), tuple)
                stack.append(self.call(self.pop(), arguments))
            case "BUILD":
                # Attributes of containers and tensors, such as the versions of modules in a state dict.
                self.pop()
                kind(self.top(), dict | TensorRecord | UnusualTensor)
            case "BINPERSID":
                stack.append(self.storage(self.pop()))
            case _:
                raise Damaged(f"its pickle holds the instruction {name}")

    def pop(self) -> Any:
        """Take the topmost value, of those above the last mark."""
        if len(self.stack) <= (self.marks[-1] if self.marks else 0):
            raise Damaged("its pickle takes more values than it makes")
        return self.stack.pop()

    def top(self) -> Any:
        """The topmost value, of those above the last mark."""
        if len(self.stack) <= (self.marks[-1] if self.marks else 0):
            raise Damaged("its pickle takes more values than it makes")
        return self.stack[-1]

    def pop_to_mark(self) -> list[Any]:
        """Take the values above the last mark, and the mark."""
        if not self.marks:
            raise Damaged("its pickle takes more values than it makes")
        place = self.marks.pop()
        items = self.stack[place:]
        del self.stack[place:]
        return items

    def extend(self, items: list[Any]) -> None:
        """Add items to the list on top."""
        kind(self.top(), list).extend(items)

    def update(self, items: list[Any]) -> None:
        """Add keys and values in turn to the dictionary on top."""
        kind(self.top(), dict).update(as_dict(items))

    def call(self, function: Any, arguments: tuple[Any, ...]) -> Any:
        """What one of the known names makes of arguments."""
        if isinstance(function, Marker):
            return Marker(function.name)
        if not isinstance(function, Known):
            raise Damaged("its pickle calls what is no function")
        # A short program could copy a long list again and again.
        self.copied += sum(len(argument) for argument in arguments if isinstance(argument, list | tuple | dict | set))
        if self.copied > MOST_COPIED:
            raise Damaged("its pickle copies its values too often")
        return function.make(*arguments)

    def storage(self, description: Any) -> StorageRecord:
        """The storage that is meant by ("storage", type, key, location, length[, part])."""
        if self.find_storage is None or not isinstance(description, tuple) or not 5 <= len(description) <= 6:
            raise Damaged("its pickle refers to something that is not in it")
        word, storage_type, key, _, numel = description[:5]
        part = description[5] if len(description) == 6 else None
        if word != "storage" or not isinstance(storage_type, StorageType) or not is_count(numel):
            raise Damaged("its pickle refers to something that is not in it")
        whole = self.find_storage(StorageRecord(str(kind(key, str | int)), storage_type.dtype, numel))
        if part is None:
            return whole
        _, start, length = kind(part, tuple)
        if not is_count(start) or not is_count(length) or start + length > numel:
            raise Damaged("a part of a storage lies outside of it")
        return StorageRecord(whole.key, whole.dtype, length, start)


@dataclass(frozen=True, eq=False)
class Known:
    """A name that a file may call.

    Attributes:
        make: What is called in its place.
    """

    make: Callable[..., Any]


@dataclass(frozen=True, eq=False)
class StorageType:
    """A class of storages, by the dtype of its numbers; None = bytes."""

    dtype: torch.dtype | None


def find_name(name: str) -> Any:
    """What stands in for a name here.

    Raises:
        ForbiddenName: Nothing does.
    """
    # Python 2 called it so, and protocol 2 still does.
    name = name.replace("__builtin__.", "builtins.", 1) if name.startswith("__builtin__.") else name
    if name in KNOWN:
        return Known(KNOWN[name])
    if name in UNUSUAL_TENSORS:
        word = UNUSUAL_TENSORS[name]
        return Known(lambda *arguments: UnusualTensor(word))
    if name in MARKERS:
        return Marker(name)
    module, _, last = name.rpartition(".")
    if module in ("torch", "torch.cuda", "torch.storage") and last in STORAGE_DTYPES:
        return StorageType(STORAGE_DTYPES[last])
    if module == "torch" and last in DTYPES:
        return DTYPES[last]
    raise ForbiddenName(name)


def kind(value: Any, expected: Any) -> Any:
    """A value, if it is of the expected kind."""
    if not isinstance(value, expected):
        raise Damaged("its pickle mixes up its values")
    return value


def is_count(value: Any) -> bool:
    """Whether this is a number of things."""
    return type(value) is int and 0 <= value <= LARGEST


def checked_key(key: Any) -> Any:
    """A key of a dictionary: a plain value, or a flat tuple, for hashing nested ones can take for ever."""
    if isinstance(key, tuple):
        for part in key:
            kind(part, str | bytes | int | float | None)
    else:
        kind(key, str | bytes | int | float | None | torch.dtype)
    return key


def as_dict(items: list[Any]) -> dict[Any, Any]:
    """Keys and values in turn as a dictionary."""
    if len(items) % 2:
        raise Damaged("its pickle has a key without a value")
    return {checked_key(key): value for key, value in zip(items[::2], items[1::2], strict=True)}


def make_dict(*arguments: Any) -> dict[Any, Any]:
    """A dictionary out of pairs, or of another one."""
    content = arguments[-1] if arguments else ()
    pairs = content.items() if isinstance(content, dict) else kind(content, list | tuple)
    made: dict[Any, Any] = OrderedDict()
    for pair in pairs:
        key, value = kind(pair, list | tuple)
        made[checked_key(key)] = value
    return made


def make_set(items: Any = ()) -> set[Any]:
    """A set out of a list."""
    return set(map(checked_key, kind(items, list | tuple | set)))


def make_bytes(text: str = "", encoding: str = "latin1") -> bytes:
    """Bytes, which protocol 2 writes as text."""
    if encoding not in ("latin1", "latin-1"):
        raise Damaged("its pickle holds bytes in an unknown form")
    return bytes(kind(text, str), "latin1")


def make_complex(real: Any, imaginary: Any) -> complex:
    """A complex number."""
    return complex(kind(real, float), kind(imaginary, float))


def make_tensor(
    storage: Any, offset: Any, shape: Any, stride: Any, *more: Any, dtype: torch.dtype | None = None
) -> Any:
    """A tensor by its place in a storage; what follows the strides says nothing of its values."""
    storage = kind(storage, StorageRecord)
    shape, stride = tuple(kind(shape, tuple | list)), tuple(kind(stride, tuple | list))
    dtype = dtype or storage.dtype
    if dtype is None or not all(map(is_count, (offset, *shape, *stride))):
        raise Damaged("a tensor has a shape that is no shape")
    if len(shape) != len(stride) or len(shape) > MOST_DIMENSIONS or math.prod(shape) > LARGEST:
        raise Damaged("a tensor has a shape that is no shape")
    if more[2:] and more[2]:
        return UnusualTensor("lazily conjugated or negated")
    if 0 not in shape:
        last = offset + sum((length - 1) * step for length, step in zip(shape, stride, strict=True))
        if (last + 1) * dtype.itemsize > storage.nbytes:
            raise Damaged("a tensor is larger than its storage")
    elif offset * dtype.itemsize > storage.nbytes:
        raise Damaged("a tensor is larger than its storage")
    return TensorRecord(storage, dtype, offset, shape, stride)


def make_typed_tensor(
    storage: Any, offset: Any, shape: Any, stride: Any, requires_grad: Any, hooks: Any, dtype: Any, metadata: Any = None
) -> Any:
    """A tensor whose dtype is said apart from its storage."""
    dtype = kind(dtype, torch.dtype)
    return make_tensor(storage, offset, shape, stride, requires_grad, hooks, metadata, dtype=dtype)


def take_tensor(tensor: Any, *more: Any) -> Any:
    """The tensor of a parameter."""
    return kind(tensor, TensorRecord | UnusualTensor)


def make_from_type(function: Any, tensor_type: Any, arguments: Any, state: Any = None) -> Any:
    """A tensor with attributes of its own, which are left out."""
    made = kind(function, Known).make(*kind(arguments, tuple))
    kind(tensor_type, Marker)
    return kind(made, TensorRecord | UnusualTensor)


KNOWN: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": make_dict,
    "collections.Counter": make_dict,
    "builtins.dict": make_dict,
    CONFIG_CLASS: make_dict,
    "builtins.set": make_set,
    "builtins.frozenset": lambda items=(): frozenset(make_set(items)),
    "builtins.bytearray": make_bytes,
    "builtins.complex": make_complex,
    "_codecs.encode": make_bytes,
    "torch.Size": lambda sizes=(): tuple(kind(sizes, list | tuple)),
    "torch._utils._rebuild_tensor": make_tensor,
    "torch._utils._rebuild_tensor_v2": make_tensor,
    "torch._utils._rebuild_tensor_v3": make_typed_tensor,
    "torch._utils._rebuild_parameter": take_tensor,
    "torch._utils._rebuild_parameter_with_state": take_tensor,
    "torch._tensor._rebuild_from_type_v2": make_from_type,
}
