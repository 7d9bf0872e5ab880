"""Compile the C code in this folder and load the compiled library. The code is compiled once per
machine and user.

If no compiler is found, or the processor is not supported, torch's operations are used instead, and
`moe-plugin doctor` reports the reason.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch

from moe_plugin.utils.machine import cache_home, user_cache
from moe_plugin.utils.messages import short

logger = logging.getLogger(__name__)
SOURCES = Path(__file__).parent
COMPILERS = ("cc", "gcc", "clang")
TIMEOUT = 60  # seconds; compiling usually takes half a second
# The code relies on neither errno nor traps, and may fuse a product and a sum without rounding in
# between. -ffast-math is not used: NaN and infinity must keep their meaning, and sums their order,
# except for sums over the values of a row.
_OPTIONS = ("-O3", "-std=gnu11", "-shared", "-fPIC", "-fopenmp-simd", "-ffp-contract=fast",
            "-fno-math-errno", "-fno-trapping-math")
# options by torch's name for the processor's capability
_PROCESSORS = {
    "AVX512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma",
               "-mprefer-vector-width=512"),
    "AVX2": ("-mavx2", "-mfma"),
}
_MORE = {"avx512_bf16": "-mavx512bf16"}
THREADS = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")


class Unavailable(Exception):
    """Raised, with the reason, if the functions cannot be compiled or run on this machine."""


@functools.cache
def library(source: str, *defines: str) -> ctypes.CDLL | str:
    """Return the compiled functions of a source file in this folder, or the reason why they are
    unavailable.

    If the compiler fails, a warning is logged.

    defines: preprocessor definitions in the form `NAME=value`.
    """
    try:
        loaded = _loaded(SOURCES / source, compiler_command(defines))
        _use_threads_of_torch(loaded)
    except (Unavailable, ValueError) as refusal:
        return str(refusal)
    except OSError as error:
        reason = f"cannot be compiled or loaded: {short(error)}"
        logger.warning("Experts on CPU use torch's operations, which are slower, instead of %s, "
                       "because it %s", source, reason)
        return reason
    return loaded


def why_not(source: str, *defines: str) -> str | None:
    """Return the reason why the functions of `library` are unavailable, or None if available."""
    functions = library(source, *defines)
    return functions if isinstance(functions, str) else None


def processor_options(machine: str, capability: str, flags: Collection[str]) -> list[str]:
    """Return the compiler options for this type of processor.

    Args:
        machine: machine name that `platform.machine` reports.
        capability: name of the CPU capability, as reported by torch.
        flags: processor flags, as reported by Linux.
    Raises: Unavailable: If this type of processor was not tested, or if the processor has no vector
    instructions.
    """
    if sys.platform != "linux" or machine != "x86_64":
        raise Unavailable(f"it supports only Linux on x86_64, and this is {sys.platform} on "
                          f"{machine}")
    if capability not in _PROCESSORS:
        raise Unavailable(f"it requires AVX2 or AVX-512, and torch reports {capability}")
    more = _MORE.items() if capability == "AVX512" else ()
    return [*_PROCESSORS[capability], *(option for flag, option in more if flag in flags)]


def compiler(environment: Mapping[str, str]) -> list[str]:
    """Return the command of the C compiler. The command is the value of the environment variable
    `CC` if it is set, otherwise the first available entry of `COMPILERS`.

    Raises: Unavailable: If no compiler was found.
    """
    try:
        named = shlex.split(environment.get("CC", ""))
    except ValueError as error:
        raise Unavailable(f"CC={environment['CC']!r} is not a command: {error}") from error
    path = environment.get("PATH")
    for command in [named] if named else [[name] for name in COMPILERS]:
        path_of_command = shutil.which(command[0], path=path)
        if path_of_command is not None:
            return [path_of_command, *command[1:]]
    wanted = f"CC={environment['CC']!r} was not found" if named else "no C compiler was found"
    raise Unavailable(f"{wanted}; on Debian or Ubuntu, run: sudo apt-get install gcc")


def compiler_command(defines: Sequence[str]) -> list[str]:
    options = processor_options(platform.machine(), torch.backends.cpu.get_cpu_capability(),
                                _flags())
    return [*compiler(os.environ), *_OPTIONS, *options, *(f"-D{define}" for define in defines)]


def has_amx() -> bool:
    """Return true if the processor and the system support AMX products of bfloat16 values."""
    return sys.platform == "linux" and {"amx_tile", "amx_bf16", "avx512_bf16"} <= _flags()


@functools.cache
def _flags() -> set[str]:
    with open("/proc/cpuinfo", encoding="utf-8") as stream:
        lines = (line for line in stream if line.startswith("flags"))
        return set(next(lines, "").partition(":")[2].split())


def _loaded(source: Path, command: list[str]) -> ctypes.CDLL:
    """Load the library that `command` builds for this processor from a source file.

    The library is compiled only if the cache contains no usable library.
    """
    texts = [path.read_text() for path in (source, *sorted(SOURCES.glob("*.h")))]
    digest = hashlib.sha256("\0".join([*command, *sorted(_flags()), *texts]).encode()).hexdigest()
    target = _folder() / f"{source.stem}-{digest[:16]}.so"
    if target.exists():
        with contextlib.suppress(OSError):
            return ctypes.CDLL(str(target))
    # Several ranks may compile at once. Each writes a separate file, and the last rename wins.
    handle, temporary = tempfile.mkstemp(".so", dir=target.parent)
    os.close(handle)
    try:
        run_compiler([*command, "-o", temporary, str(source)])
        library = ctypes.CDLL(temporary)
        os.replace(temporary, target)
        return library
    except OSError:
        if target.exists():  # another rank succeeded: all ranks of a node must use the same code
            return ctypes.CDLL(str(target))
        raise
    finally:
        Path(temporary).unlink(missing_ok=True)


def run_compiler(command: list[str]) -> None:
    """Run the compiler.

    Raises:
        OSError: If the compiler fails, or runs for longer than `TIMEOUT`.
    """
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                          start_new_session=True) as started:
        try:
            stderr = started.communicate(timeout=TIMEOUT)[1].decode(errors="replace").strip()
        except subprocess.TimeoutExpired:
            os.killpg(started.pid, signal.SIGKILL)  # including the programs that it started
            raise OSError(f"{command[0]} did not finish within {TIMEOUT} s") from None
    if started.returncode:
        raise OSError(f"{command[0]} failed with exit status {started.returncode}: {short(stderr)}")


def _folder() -> Path:
    """Return the folder for compiled code, to which other users must not have write permission."""
    try:
        folder = cache_home() / "native"
    except RuntimeError as error:  # the user has no home directory
        raise Unavailable(f"there is no folder for compiled code: {error}") from error
    return user_cache("compiled code cannot be cached", folder)


def _use_threads_of_torch(found: ctypes.CDLL) -> None:
    loaded = ctypes.CDLL(None)  # symbols of all libraries that torch has loaded
    try:
        addresses = [ctypes.cast(getattr(loaded, name), ctypes.c_void_p) for name in THREADS]
    except AttributeError:
        raise Unavailable("this build of torch does not use OpenMP threads") from None
    found.connect_threads(*addresses)
