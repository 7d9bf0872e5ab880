"""Compiles this folder's C for the processor, once per machine and user, and loads it.

Where that is not possible (no compiler, another processor) torch's operations take its place, and
`moe-plugin doctor` says why.
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
TIMEOUT = 60  # seconds; half a second is usual
# No function sets errno or traps, and a product may be added without being rounded before; sums
# keep their order, but for those over a row's values, and NaN and infinity keep their meaning.
_OPTIONS = ("-O3", "-std=gnu11", "-shared", "-fPIC", "-fopenmp-simd", "-ffp-contract=fast",
            "-fno-math-errno", "-fno-trapping-math")
# by torch's name of what the processor has, and by its own
_PROCESSORS = {
    "AVX512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma",
               "-mprefer-vector-width=512"),
    "AVX2": ("-mavx2", "-mfma"),
}
_MORE = {"avx512_bf16": "-mavx512bf16"}
THREADS = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")


class Unavailable(Exception):
    """The functions cannot be compiled or run here; the text says why."""


@functools.cache
def library(source: str, *defines: str) -> ctypes.CDLL | str:
    """The functions of a source file of this folder, or why there are none.

    defines: `NAME=value` of the preprocessor. A compiler that fails is reported, as a warning.
    """
    try:
        found = _loaded(SOURCES / source, compiler_command(defines))
        _use_threads_of_torch(found)
    except (Unavailable, ValueError) as reason:
        return str(reason)
    except OSError as error:
        reason = f"cannot be compiled or loaded: {short(error)}"
        logger.warning("torch's operations, which are slower, take the place of %s in experts on "
                       "CPU: it %s", source, reason)
        return reason
    return found


def why_not(source: str, *defines: str) -> str | None:
    """Why `library` has no such functions; None where it has."""
    found = library(source, *defines)
    return found if isinstance(found, str) else None


def processor_options(machine: str, capability: str, flags: Collection[str]) -> list[str]:
    """Compiler options for a processor.

    Args:
        machine: as `platform.machine` says it.
        capability: as torch does.
        flags: as Linux does.
    Raises: Unavailable: a processor for which this has not been tried, or without vectors.
    """
    if sys.platform != "linux" or machine != "x86_64":
        raise Unavailable(f"it is for Linux on x86_64, and this is {sys.platform} on {machine}")
    if capability not in _PROCESSORS:
        raise Unavailable(f"it is for AVX2 and AVX-512, and torch finds {capability}")
    more = _MORE.items() if capability == "AVX512" else ()
    return [*_PROCESSORS[capability], *(option for flag, option in more if flag in flags)]


def compiler(environment: Mapping[str, str]) -> list[str]:
    """The C compiler's command: `CC`, else the first of `COMPILERS`.

    Raises: Unavailable: there is none.
    """
    try:
        named = shlex.split(environment.get("CC", ""))
    except ValueError as error:
        raise Unavailable(f"CC={environment['CC']!r} is not a command: {error}") from error
    path = environment.get("PATH")
    for command in [named] if named else [[name] for name in COMPILERS]:
        found = shutil.which(command[0], path=path)
        if found is not None:
            return [found, *command[1:]]
    wanted = f"CC={environment['CC']!r} is not found" if named else "no C compiler is found"
    raise Unavailable(f"{wanted}; on Debian or Ubuntu: sudo apt-get install gcc")


def compiler_command(defines: Sequence[str]) -> list[str]:
    options = processor_options(platform.machine(), torch.backends.cpu.get_cpu_capability(),
                                _flags())
    return [*compiler(os.environ), *_OPTIONS, *options, *(f"-D{define}" for define in defines)]


@functools.cache
def _flags() -> set[str]:
    with open("/proc/cpuinfo", encoding="utf-8") as stream:
        lines = (line for line in stream if line.startswith("flags"))
        return set(next(lines, "").partition(":")[2].split())


def _loaded(source: Path, command: list[str]) -> ctypes.CDLL:
    """The library that a command makes of a source on this processor, made now if it has not been
    before, or does not load.
    """
    texts = [path.read_text() for path in (source, *sorted(SOURCES.glob("*.h")))]
    digest = hashlib.sha256("\0".join([*command, *sorted(_flags()), *texts]).encode()).hexdigest()
    target = _folder() / f"{source.stem}-{digest[:16]}.so"
    if target.exists():
        with contextlib.suppress(OSError):
            return ctypes.CDLL(str(target))
    # ranks may do this at once: each writes a file of its own, and the last one stays
    handle, made = tempfile.mkstemp(".so", dir=target.parent)
    os.close(handle)
    try:
        run_compiler([*command, "-o", made, str(source)])
        found = ctypes.CDLL(made)
        os.replace(made, target)
        return found
    except OSError:
        if target.exists():  # another rank could: all of a node compute alike
            return ctypes.CDLL(str(target))
        raise
    finally:
        Path(made).unlink(missing_ok=True)


def run_compiler(command: list[str]) -> None:
    """Raises:
        OSError: it fails, or takes longer than `TIMEOUT`.
    """
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                          start_new_session=True) as started:
        try:
            said = started.communicate(timeout=TIMEOUT)[1].decode(errors="replace").strip()
        except subprocess.TimeoutExpired:
            os.killpg(started.pid, signal.SIGKILL)  # with the programs that it runs
            raise OSError(f"{command[0]} does not end within {TIMEOUT} s") from None
    if started.returncode:
        raise OSError(f"{command[0]} ends with {started.returncode}: {short(said)}")


def _folder() -> Path:
    """Where compiled functions are kept: code, which no other user may have put there."""
    try:
        folder = cache_home() / "native"
    except RuntimeError as error:  # a user without a home
        raise Unavailable(f"there is no folder for what is compiled: {error}") from error
    return user_cache("what is compiled there cannot be kept", folder)


def _use_threads_of_torch(found: ctypes.CDLL) -> None:
    loaded = ctypes.CDLL(None)  # with what torch has loaded
    try:
        addresses = [ctypes.cast(getattr(loaded, name), ctypes.c_void_p) for name in THREADS]
    except AttributeError:
        raise Unavailable("this torch runs its threads without OpenMP") from None
    found.connect_threads(*addresses)
