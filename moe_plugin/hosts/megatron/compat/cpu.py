"""Optional support for running Megatron-core without CUDA, with CPU tensors and the gloo backend.
If CUDA is available, this module has no effect.

Megatron-core uses the current CUDA device, CUDA streams and CUDA random states. Megatron-core also
contains hard-coded `device="cuda"` arguments. Each patch below lists the functions it replaces, the
Megatron-core versions that need the patch, and the reason. `enable()` applies all patches until the
process ends. Call `enable()` before any Megatron object is built. The MoE layer of this package
does not need any of these patches.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from moe_plugin.comm.host_collectives import comm_of


@dataclass(frozen=True)
class Patch:
    """A patch that replaces one or more functions.

    Attributes:
        target: names of the replaced functions.
        versions: versions of Megatron-core that need the patch.
        reason: why the patch is needed.
        apply: function that applies the patch.
    """

    target: str
    versions: str
    reason: str
    apply: Callable[[], None]


PATCHES: list[Patch] = []


def patch_in(patches: list[Patch], target: str, versions: str,
             reason: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Decorator that appends a patch function to the list `patches`."""

    def add(apply: Callable[[], None]) -> Callable[[], None]:
        patches.append(Patch(target, versions, reason, apply))
        return apply

    return add


_patch = functools.partial(patch_in, PATCHES)


def enable(force: bool = False) -> bool:
    """Apply all patches that make Megatron-core run on CPU.

    Returns: True if the patches are active. If CUDA is available, no patch is applied and the
    return value is False.

    force: True to apply the patches even if CUDA is available. Use this option for a process that
    must run on CPU.
    """
    if torch.cuda.is_available() and not force:
        return False
    _replace()
    if not getattr(torch.cuda, "_moe_plugin_literals", False):
        _CudaMeansCpu().__enter__()
        torch.cuda._moe_plugin_literals = True  # type: ignore[attr-defined]
    return True


def engine_installed() -> bool:
    """Return True if Transformer Engine is installed. Nothing is imported."""
    return importlib.util.find_spec("transformer_engine") is not None


def enabled() -> bool:
    """Return True if `enable` has switched the process to CPU permanently."""
    return hasattr(torch.cuda, "_moe_plugin_literals")


@contextlib.contextmanager
def building() -> Iterator[None]:
    """Inside the block, Megatron-core objects are built on CPU. The change is temporary.

    `enable` maps the device "cuda" to "cpu" in every torch call. This mapping slows down each call
    and changes the results of torch.compile. After a layer has been built, the mapping is no longer
    needed. This context manager therefore removes the mapping at the end of the block.
    """
    _replace()
    with _CudaMeansCpu():
        yield


def _replace() -> None:
    if not getattr(torch.cuda, "_moe_plugin_cpu", False):
        for patch in PATCHES:
            patch.apply()
        torch.cuda._moe_plugin_cpu = True  # type: ignore[attr-defined]


class _Stream:
    """Replacement for a CUDA stream or event that reports all work as complete."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_exc: object) -> None:
        return None

    def wait(self, *_args: Any) -> None:
        """Return at once. Do nothing. Do nothing. `record`, `synchronize` and other calls that only
        order work are aliases of this method.
        """

    wait_stream = wait_event = synchronize = record = wait

    def record_event(self, *_args: Any) -> _Stream:
        """Return an event that is already complete."""
        return self

    def query(self) -> bool:
        """Return True, because all work is complete."""
        return True

    def elapsed_time(self, _other: Any) -> float:
        """Return 0 as the time between two events, in milliseconds."""
        return 0.0


def _always(result: Any) -> Callable[..., Any]:
    # a new function for each call, because torch.compile refuses one object under two torch names
    return lambda *_args, **_kwargs: result


@_patch("torch.cuda streams, events, synchronize, nvtx", "0.12 to 0.19",
        "token_dispatcher, schedules and timers create streams and wait for them unconditionally")
def _streams() -> None:
    cuda: Any = torch.cuda
    the_stream = _Stream()
    cuda.Stream = cuda.Event = _Stream
    for name in ("current_stream", "default_stream"):
        setattr(cuda, name, _always(the_stream))
    for name in ("synchronize", "empty_cache", "set_device"):
        setattr(cuda, name, _always(None))
    cuda.nvtx.range_push, cuda.nvtx.range_pop = _always(None), _always(None)
    Tensor.record_stream = _always(None)  # type: ignore[method-assign]

    # a new context per call, because Megatron enters the same context twice with several instances
    # of the distributed optimizer
    cuda.stream = lambda _stream: contextlib.nullcontext()


@_patch(
    "torch.cuda.current_device", "0.12 to 0.19",
    "used as the device of new tensors in router, layers, mappings, "
    "param_and_grad_buffer, p2p_communication")
def _device() -> None:
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]


@_patch(
    "torch.cuda.is_current_stream_capturing", "0.19 to 0.20",
    "the hooks of routing traces call it, and a build of torch without CUDA raises an error")
def _capturing() -> None:
    torch.cuda.is_current_stream_capturing = _always(False)


@_patch(
    "torch.cuda random states; tensor_parallel.random", "0.12 to 0.19",
    "the random-number tracker stores CUDA generator states; on CPU torch has a single generator")
def _random() -> None:
    cuda: Any = torch.cuda
    random: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    for module, getter, setter in ((cuda, "get_rng_state", "set_rng_state"),
                                   (cuda.random, "get_rng_state", "set_rng_state"),
                                   (random, "_get_cuda_rng_state", "_set_cuda_rng_state")):
        setattr(module, getter, lambda *_a, **_k: torch.get_rng_state())
        setattr(module, setter, lambda state, *_a, **_k: torch.set_rng_state(state))
    # otherwise the tracker would warn at every fork that it uses the CPU's generator
    logging.getLogger(random.__name__).setLevel(logging.ERROR)
    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(seed)


@_patch("inference_layers.is_inference_column_parallel_linear", "main of August",
        "multi-token prediction calls it, and its isinstance check raises an error without "
        "Transformer Engine")
def _no_inference_layers() -> None:
    if engine_installed():
        return
    module: Any = importlib.import_module("megatron.core.transformer.multi_token_prediction")
    if hasattr(module, "is_inference_column_parallel_linear"):  # imported by name
        module.is_inference_column_parallel_linear = lambda module: False


def _on_cpu(device: Any) -> Any:
    device_type = device.type if isinstance(device, torch.device) else device
    return "cpu" if isinstance(device_type, str) and device_type.startswith("cuda") else device


class _CudaMeansCpu(TorchFunctionMode):
    """A torch function mode that maps "cuda" to "cpu" in every torch call made from Python.

    Megatron-core 0.12 to 0.19 contains hard-coded CUDA devices and tensor types, such as
    `device='cuda'`, `Tensor.cuda()` and `Tensor.type()`, in its schedules, in the optimizer, in
    clip_grads and in moe_utils.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if func is Tensor.cuda:
            return args[0]
        if name == "type" and len(args) == 1 and not kwargs:
            return _tensor_type(func(*args), sys._getframe(1).f_code.co_filename)
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        kwargs.pop("pin_memory", None)
        if name == "to":
            args = tuple(_on_cpu(a) for a in args)
        return func(*args, **kwargs)


def _tensor_type(name: str, caller: str) -> str:
    # only the optimizer compares with 'torch.cuda.FloatTensor'; other callers get the real type
    return name.replace("torch.", "torch.cuda.", 1) if "megatron/core/optimizer" in caller.replace(
        "\\", "/") else name


@_patch(
    "transformer.torch_norm.WrappedTorchNorm", "0.12 to 0.19",
    "it refuses sequence parallelism, although it is Megatron's only norm without Apex and "
    "Transformer Engine")
def _norm() -> None:
    from moe_plugin.hosts.megatron.compat.sequence_parts import LocalNorm

    module = importlib.import_module("megatron.core.transformer.torch_norm")
    module.WrappedTorchNorm.__new__ = lambda _cls, *args, **kwargs: LocalNorm(*args, **kwargs)


@_patch("transformer.moe.moe_utils.te_general_gemm", "0.14 to 0.16",
        "the native router reads this name, which exists only with Transformer Engine")
def _te_gemm() -> None:
    utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    if not hasattr(utils, "te_general_gemm"):
        utils.te_general_gemm = None  # type: ignore[attr-defined]


@_patch("moe_utils.maybe_move_tensor_to_cpu", "0.13 to 0.19",
        "split sizes that are already on CPU remain tensors, but all-to-all needs a list")
def _splits() -> None:
    utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    original = utils.maybe_move_tensor_to_cpu

    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if torch.is_tensor(tensor) and as_numpy:
            return tensor.numpy()
        return original(tensor, as_numpy=as_numpy, record_stream=record_stream)

    for name in ("moe_utils", "token_dispatcher"):
        module = importlib.import_module(f"megatron.core.transformer.moe.{name}")
        module.maybe_move_tensor_to_cpu = move  # type: ignore[attr-defined]


@_patch("tensor_parallel.mappings._gather_along_first_dim, _reduce_scatter_along_first_dim",
        "0.12 to 0.19", "gloo does not support all-gather and reduce-scatter of unequal pieces")
def _uneven() -> None:
    mappings = importlib.import_module("megatron.core.tensor_parallel.mappings")
    even_gather = mappings._gather_along_first_dim
    even_scatter = mappings._reduce_scatter_along_first_dim

    def gather(x: Tensor, group: Any, output_split_sizes: Any = None,
               use_global_buffer: bool = False) -> Tensor:
        if output_split_sizes is None or group.size() == 1:
            return even_gather(x, group, output_split_sizes, use_global_buffer)
        lengths = [int(n) for n in output_split_sizes]
        padded = x.new_zeros((max(lengths), *x.shape[1:]))
        padded[: x.shape[0]] = x
        parts = comm_of(group).all_gather(padded).split(max(lengths))
        return torch.cat([part[:n] for part, n in zip(parts, lengths, strict=True)])

    def scatter(x: Tensor, group: Any, input_split_sizes: Any = None,
                use_global_buffer: bool = False) -> Tensor:
        if input_split_sizes is None or group.size() == 1:
            return even_scatter(x, group, input_split_sizes, use_global_buffer)
        total = comm_of(group).all_reduce(x.contiguous())
        return total.split([int(n) for n in input_split_sizes])[group.rank()].clone()

    replaced: Any = mappings
    replaced._gather_along_first_dim = gather
    replaced._reduce_scatter_along_first_dim = scatter


@_patch("transformer.dot_product_attention.DotProductAttention", "0.15 to 0.19",
        "it refuses context parallelism and packed sequences, which Megatron supports only with "
        "Transformer Engine")
def _attention() -> None:
    from moe_plugin.hosts.megatron.compat import sequence_parts

    sequence_parts.extend()
