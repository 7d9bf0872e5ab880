"""Utilities for processor names, device transfers, pinned memory, cache folders and child
processes.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import math
import mmap
import os
import platform
import shlex
import shutil
import signal
import stat
import tempfile
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from moe_plugin.utils.messages import warn_once

_PR_SET_PDEATHSIG = 1
_NEVER_GIVEN_BACK: list[mmap.mmap] = []  # pinned memory freed during a graph capture


# Whether `torch.export` traces this call. An exported program is one graph for all values:
# everything that depends on values is computed in the graph, not on the host. Up to torch 2.11,
# `is_exporting` is true for every compiled graph, so the internal flag is used.
exporting = (torch.compiler.is_exporting if TorchVersion(torch.__version__) >= "2.12"
             else lambda: torch.compiler._is_exporting_flag)


@functools.cache
def cpu_name() -> str:
    """Return the model name of the CPU."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as stream:
            return next(
                line.split(":", 1)[1].strip() for line in stream if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def device_name(device: torch.device) -> str:
    """Return the model name of a GPU or CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def to_device(numbers: Sequence[Any] | Tensor, device: torch.device) -> Tensor:
    """Copy integers from the host to an int64 tensor on a device. The host does not wait for a GPU.
    """
    table = torch.as_tensor(numbers, dtype=torch.int64)
    if device.type in ("cpu", "meta"):
        return table.to(device)
    if capturing(device):
        # Each replay would read the pinned memory again, after torch has reused it for other data.
        raise RuntimeError("a CUDA graph cannot contain row counts from the host: each replay "
                           "would use the counts of the capture; set dispatch.name to bounded, or "
                           "leave this layer out of the graph")
    # a copy from pinned memory does not block the host
    return table.pin_memory().to(device, non_blocking=True)


def capturing(device: torch.device) -> bool:
    """Return whether a CUDA graph is currently capturing the kernels that this thread launches on
    the device.
    """
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def inside_backward() -> bool:
    """Return whether this code runs inside a backward pass, which means that it recomputes a
    forward pass.
    """
    # The autograd engine sets this id during a backward pass; it is -1 outside (torch >= 2.0).
    return torch._C._current_graph_task_id() != -1


def wait_for_device(device: torch.device) -> None:
    """Make the host wait until a GPU has finished all queued work, for example before measuring
    time.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def start_to_host(x: Tensor) -> Callable[[], Tensor]:
    """Start to copy a tensor from a device to the host, and return a function that waits for the
    copy.

    The returned function waits only for work that was queued before `start_to_host` was called, and
    returns the copy.
    """
    if x.device.type == "cpu":
        return lambda: x
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    host.copy_(x, non_blocking=True)
    module = torch.get_device_module(x.device)
    arrived = module.Event()
    arrived.record(module.current_stream(x.device))

    def wait() -> Tensor:
        arrived.synchronize()
        return host

    return wait


def record_event(device: torch.device, timing: bool = True) -> torch.cuda.Event:
    """Record an event on the current stream of the given GPU, which need not be torch's current
    device.
    """
    event = torch.cuda.Event(enable_timing=timing)
    event.record(torch.cuda.current_stream(device))
    return event


def pinned_buffer(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate uninitialized pinned host memory for long-lived data that is accessed by GPU kernels
    and copies.

    The memory has exactly the requested size, whereas torch would round it up to a power of two.
    The memory is freed once no tensor refers to it and the device has finished all work that was
    queued before. Waiting for the device is necessary because torch's allocator tracks copies to
    and from pinned memory, but not Triton kernels. For data that is needed only during part of a
    step, use torch's pinned memory instead, which is cached.

    Args:
        device: GPU that uses the memory. If the device has no index, torch's current GPU is used.
    Raises:
        RuntimeError: If the memory cannot be pinned. The message contains the CUDA error number.
    """
    if device.index is None:  # the memory may be freed in another thread with another current GPU
        device = torch.device(device.type, torch.cuda.current_device())
    memory = mmap.mmap(-1, max(1, math.prod(shape) * dtype.itemsize))
    owner = (ctypes.c_char * len(memory)).from_buffer(memory)
    bytes_N = torch.frombuffer(owner, dtype=torch.uint8)
    runtime, address = torch.cuda.cudart(), bytes_N.data_ptr()
    status = int(runtime.cudaHostRegister(address, len(memory), 0))
    if status:
        raise RuntimeError(f"{len(memory)} bytes of host memory cannot be pinned: CUDA error "
                           f"{status}; ask for less, or raise the limit of locked memory "
                           "(ulimit -l)")

    def give_back(memory: mmap.mmap) -> None:
        if capturing(device):  # synchronization is not allowed during a capture
            _NEVER_GIVEN_BACK.append(memory)
            return
        torch.cuda.synchronize(device)
        runtime.cudaHostUnregister(address)

    # the argument keeps the memory alive until then; at exit the system frees it anyway
    weakref.finalize(owner, give_back, memory).atexit = False  # type: ignore[misc]  # not a slot
    return bytes_N[:math.prod(shape) * dtype.itemsize].view(dtype).view(torch.Size(shape))


def pinned_copy(x: Tensor, device: torch.device) -> Tensor:
    """Return a copy of a tensor in pinned host memory (see `pinned_buffer`)."""
    with torch.no_grad():
        return pinned_buffer(x.shape, x.dtype, device).copy_(x)


def memory_bytes(device: torch.device) -> int | None:
    """Return the total memory of a device in bytes, or None if it is unknown."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if device.type != "cpu" or "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def cache_home() -> Path:
    """Return the path of the folder for all data that this package keeps between runs.

    The folder is called `moe-plugin` and is located in `XDG_CACHE_HOME` if this variable contains
    an absolute path, and in `~/.cache` otherwise.
    """
    named = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(named) if os.path.isabs(named) else Path.home() / ".cache") / "moe-plugin"


def user_cache(purpose: str, folder: Path | None = None) -> Path:
    """Return the folder for all caches that are kept between runs. The folder is created if it does
    not exist.

    The folder belongs to the current user, and no other user may write to it, because compiled
    programs in it are executed. If the folder cannot be created, a folder in the system's temporary
    directory is used instead. If other users can write to the folder, a new folder is used, which
    is deleted when the process ends.

    Args:
        purpose: what is not possible without the folder, for error messages.
        folder: optional. Defaults to `cache_home`.
    Raises:
        ValueError: If the folder is not writable.
    """
    try:
        folder = folder or cache_home()
        for path in (*reversed(folder.parents), folder):
            if not path.exists():
                path.mkdir(mode=0o700, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: the user has no home folder
        folder = Path(tempfile.gettempdir()) / f"moe-plugin-{os.getuid()}"
        with contextlib.suppress(OSError):  # reported by the check below
            folder.mkdir(mode=0o700, exist_ok=True)
    if folder.exists() and not _is_private(folder):
        warn_once(__name__, f"the cache {folder} is not used, because other users can write there "
                  "and programs are run from it. Nothing is cached between runs. If the folder is "
                  f"yours, remove its contents and run: chmod 700 {shlex.quote(str(folder))}")
        return fresh_cache()
    if not os.access(folder, os.W_OK):
        raise ValueError(f"{folder} is not writable, so {purpose}; make it writable")
    return folder


def _is_private(folder: Path) -> bool:
    """Return whether a folder belongs to the current user and no other user can write to it."""
    status = folder.stat()
    ours = status.st_uid == os.getuid() == folder.lstat().st_uid
    return ours and stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o022


@functools.cache
def fresh_cache() -> Path:
    """Create a new folder to which no other user can write, and which is deleted when this process
    ends.
    """
    folder = tempfile.mkdtemp(prefix="moe-plugin-")
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return Path(folder)


def die_with_parent(parent: int) -> None:
    """Ask the operating system to kill this process as soon as its parent process ends for any
    reason.

    More precisely, this process is killed when the parent's thread that started it ends.

    Args:
        parent: process id of the parent.
    """
    call_libc("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent ended before the call
        os._exit(1)


def call_libc(name: str, *args: int) -> None:
    """Call a function of the C library. If it does not return 0, raise an `OSError` with the
    reason.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*args):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)
