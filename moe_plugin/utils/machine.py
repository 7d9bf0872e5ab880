"""This machine: names of its processors, how numbers get to a device, a folder for results that
outlive a run, and processes that do not outlive the one that started them.
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
_NEVER_GIVEN_BACK: list[mmap.mmap] = []  # pinned memory whose last user went during a capture


# Whether `torch.export` makes a program of this call (False before torch 2.7). It is one graph, for
# any values: what depends on them is computed in it, and nothing is left to the host. Up to 2.11
# torch's own function says so of every graph of its compiler, and only the flag tells
exporting = (torch.compiler.is_exporting if TorchVersion(torch.__version__) >= "2.12"
             else lambda: getattr(torch.compiler, "_is_exporting_flag", False))


@functools.cache
def cpu_name() -> str:
    """The processor's name."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as stream:
            return next(
                line.split(":", 1)[1].strip() for line in stream if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def device_name(device: torch.device) -> str:
    """Name of the processor behind a device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def to_device(numbers: Sequence[Any] | Tensor, device: torch.device) -> Tensor:
    """int64 tensor of integers of the host, nested as they are; a GPU's host does not wait."""
    table = torch.as_tensor(numbers, dtype=torch.int64)
    if device.type in ("cpu", "meta"):
        return table.to(device)
    if capturing(device):
        # each replay would read the pinned memory again, which torch has given to others by then
        raise RuntimeError("a CUDA graph cannot hold row counts that the host knows: each replay "
                           "would use those of the capture; set dispatch.name to bounded, or leave "
                           "this layer out of the graph")
    # from pinned memory the copy does not wait for the device
    return table.pin_memory().to(device, non_blocking=True)


def capturing(device: torch.device) -> bool:
    """Whether what this thread launches on the device goes to a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def inside_backward() -> bool:
    """Whether this code runs inside a backward pass, that is, in a recomputation."""
    # set by the autograd engine for the time of a backward pass; -1 outside (torch >= 2.0)
    return torch._C._current_graph_task_id() != -1


def wait_for_device(device: torch.device) -> None:
    """Let the host wait until a GPU has done what it was given: before a clock is read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def start_to_host(x: Tensor) -> Callable[[], Tensor]:
    """Begin to copy a tensor of a device to the host; what is returned waits for it and gives it.

    It waits for what the device was given before this call, and for nothing after.
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
    """An event on the current stream of a GPU: of this one, not of the current GPU."""
    event = torch.cuda.Event(enable_timing=timing)
    event.record(torch.cuda.current_stream(device))
    return event


def pinned_buffer(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Host memory that a GPU's kernels and copies reach, not initialised; for what lives long.

    It is exactly as large as asked (torch's own pinned memory is rounded up to a power of two), and
    given back when no tensor refers to it and the device has done all that it was given before:
    torch's allocator knows of copies that use pinned memory, but not of Triton's kernels. What
    lives for a part of a step is torch's own pinned memory, which is kept for the next time.

    device: a GPU; without a number, the caller's current one.
    Raises:
        RuntimeError: the memory cannot be registered, with CUDA's reason.
    """
    if device.index is None:  # it is given back in any thread, where another may be current
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
        if capturing(device):  # it may not wait
            _NEVER_GIVEN_BACK.append(memory)
            return
        torch.cuda.synchronize(device)
        runtime.cudaHostUnregister(address)

    # its argument keeps the memory until then; the process's end gives all back
    weakref.finalize(owner, give_back, memory).atexit = False
    return bytes_N[:math.prod(shape) * dtype.itemsize].view(dtype).view(torch.Size(shape))


def pinned_copy(x: Tensor, device: torch.device) -> Tensor:
    """A copy of x in a `pinned_buffer`."""
    with torch.no_grad():
        return pinned_buffer(x.shape, x.dtype, device).copy_(x)


def memory_bytes(device: torch.device) -> int | None:
    """Memory of a device, all of it; None where it is not known."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if device.type != "cpu" or "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def cache_home() -> Path:
    """Where all that outlives a run lies: `XDG_CACHE_HOME`, if it is an absolute path, else
    `~/.cache`, and below it `moe-plugin`.
    """
    named = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(named) if os.path.isabs(named) else Path.home() / ".cache") / "moe-plugin"


def user_cache(purpose: str, folder: Path | None = None) -> Path:
    """A folder that outlives the process, created if missing; every cache is in it. It belongs to
    this user, and no other user can write there: programs are compiled into it and run from it.

    If it cannot be created it is below the temporary folder. If others can write there a new folder
    takes its place, for this process alone.

    Args:
        purpose: what errors say is impossible without it.
        folder: optional. Defaults to `cache_home`.
    Raises: ValueError: not writable.
    """
    try:
        folder = folder or cache_home()
        for path in (*reversed(folder.parents), folder):
            if not path.exists():
                path.mkdir(mode=0o700, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: the user has no home
        folder = Path(tempfile.gettempdir()) / f"moe-plugin-{os.getuid()}"
        with contextlib.suppress(OSError):  # the check below says it
            folder.mkdir(mode=0o700, exist_ok=True)
    if folder.exists() and not _is_private(folder):
        warn_once(__name__, f"the cache {folder} is not used, because other users can write there, "
                  "and programs are run from it: nothing is kept between runs. If it is yours, "
                  f"remove what is in it and: chmod 700 {shlex.quote(str(folder))}")
        return fresh_cache()
    if not os.access(folder, os.W_OK):
        raise ValueError(f"{folder} is not writable, so {purpose}; make it writable")
    return folder


def _is_private(folder: Path) -> bool:
    """Whether a folder is this user's, and no other user can write there."""
    found = folder.stat()
    ours = found.st_uid == os.getuid() == folder.lstat().st_uid
    return ours and stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o022


@functools.cache
def fresh_cache() -> Path:
    """A new folder that no other user can write, for the life of this process."""
    folder = tempfile.mkdtemp(prefix="moe-plugin-")
    owner = os.getpid()
    atexit.register(lambda: os.getpid() == owner and shutil.rmtree(folder, ignore_errors=True))
    return Path(folder)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent (the thread of it that started this one)
    ends, for any reason. parent: its id.
    """
    call_libc("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it has ended before
        os._exit(1)


def call_libc(name: str, *args: int) -> None:
    """A function of the C library that returns 0. `OSError` with its reason if it does not."""
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*args):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)
