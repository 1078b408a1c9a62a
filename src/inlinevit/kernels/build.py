"""Compile the kernels: called when the package is built or installed, never when it is used.

This file imports nothing but the standard library, because the build hook (hatch_build.py) and the Makefile run it from
its path, before the package exists: `python src/inlinevit/kernels/build.py --sanitize`.
"""

import argparse
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).resolve().parent / "native"
LIBRARY = SOURCES.parent / ("libinlinevit_kernels" + (".dylib" if sys.platform == "darwin" else ".so"))

# -ffp-contract: products and sums become fused multiply-adds. -Wno-psabi: vectors are never passed between variants.
FLAGS = ("-std=c++20", "-fPIC", "-fvisibility=hidden", "-ffp-contract=fast", "-Wall", "-Wextra", "-Wno-psabi")
# -falign-loops: products are up to a tenth slower if their inner loop begins in the middle of a cache line.
OPTIMIZED = ("-O3", "-falign-loops=64")
SANITIZED = ("-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")

AVX2 = ("-mavx2", "-mfma")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512")
# Name of each variant of native/variant.cpp: flags of its instruction set, bytes of a vector, macros.
X86_VARIANTS = {
    "avx2": (AVX2, 32, ()),
    "avx512": (AVX512, 64, ()),
    "avx512_vnni": ((*AVX512, "-mavx512vnni"), 64, ("-DINLINEVIT_VNNI",)),
}
GENERIC = {"generic": ((), 16, ())}


class BuildError(Exception):
    """The kernels cannot be compiled here."""


def find_compiler() -> str:
    """Return the C++ compiler: CXX, or the first that exists."""
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and shutil.which(shlex.split(name)[0]):
            return name
    raise BuildError("no C++ compiler was found; install g++ or clang++, or set CXX")


def build(library: Path = LIBRARY, *, sanitize: bool = False, emulate: bool = False) -> None:
    """Compile all variants into one shared library.

    Args:
        library: The file to write; it is replaced at once, when everything has been compiled.
        sanitize: With AddressSanitizer and UndefinedBehaviorSanitizer.
        emulate: Compile the AVX-512 variants to AVX2 instructions, to test their source on CPUs without AVX-512.

    Raises:
        BuildError: With the message of the compiler, if it fails.
    """
    compiler = shlex.split(find_compiler())
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    common = [*FLAGS, *(SANITIZED if sanitize else OPTIMIZED), *(["-DINLINEVIT_X86"] if x86 else [])]
    if emulate:
        common.append("-DINLINEVIT_ASSUME_SUPPORT")
    with tempfile.TemporaryDirectory() as folder:
        commands = [[*common, "-c", str(SOURCES / name)] for name in ("runtime.cpp", "dispatch.cpp")]
        for name, (instructions, width, macros) in ({**X86_VARIANTS, **GENERIC} if x86 else GENERIC).items():
            instructions = AVX2 if emulate and width == 64 else instructions
            variant = [f"-DINLINEVIT_VARIANT={name}", f"-DINLINEVIT_VECTOR_BYTES={width}", *macros]
            commands.append([*common, *instructions, *variant, "-c", str(SOURCES / "variant.cpp")])
        objects = [str(Path(folder) / f"{index}.o") for index in range(len(commands))]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            compiling = [
                pool.submit(run, [*compiler, *command, "-o", target])
                for command, target in zip(commands, objects, strict=True)
            ]
            for future in compiling:
                future.result()
        linked = Path(folder) / library.name
        run([*compiler, *common, "-shared", "-pthread", *objects, "-o", str(linked)])
        # Moved within its folder, so that a process that has loaded the old library keeps it.
        copied = library.with_name(f".{library.name}.{os.getpid()}")
        shutil.copyfile(linked, copied)
        copied.replace(library)


def run(command: Sequence[str]) -> None:
    """Run the compiler."""
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode != 0:
        raise BuildError(f"{shlex.join(command)} failed:\n{ended.stderr.strip()}")


def is_current(library: Path = LIBRARY) -> bool:
    """Return whether the library exists and is newer than its sources."""
    sources = [*SOURCES.iterdir(), Path(__file__)]
    return library.exists() and library.stat().st_mtime > max(source.stat().st_mtime for source in sources)


def main() -> None:
    """Compile the library from the command line."""
    parser = argparse.ArgumentParser(description="Compile the CPU kernels.")
    parser.add_argument("--output", type=Path, default=LIBRARY, help="the library to write")
    parser.add_argument("--sanitize", action="store_true", help="with AddressSanitizer and UndefinedBehaviorSanitizer")
    parser.add_argument("--emulate", action="store_true", help="AVX-512 variants with AVX2 instructions, for tests")
    arguments = parser.parse_args()
    try:
        build(arguments.output, sanitize=arguments.sanitize, emulate=arguments.emulate)
    except BuildError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
