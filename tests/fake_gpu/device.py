"""A device that computes on the CPU and notes what a GPU's host would wait for.

`register()` makes a device "counting" of torch's backend for Python. A tensor on it is a wrapper
around one on the CPU: operations run there, tensors of the two devices do not mix, autograd works.
Inside `CountingDevice(events)` every step for which the host of a GPU would wait is noted, with the
lines that led to it. Registering a backend is for the whole process: do it in one of its own.

What executes operations is a `Machine`: the CPU, at once. `tests.fake_gpu` has one with streams.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode

from tests.fake_gpu.events import EVENTS

NAME = "counting"
# operations after which a GPU's host knows a value, or a size that depends on values
READS = {
    "aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::equal", "aten::nonzero",
    "aten::masked_select", "aten::unique_dim", "aten::_unique", "aten::_unique2",
    "aten::unique_consecutive", "aten::bincount", "aten::histc", "aten::_linalg_check_errors"
}
# operations that take indices from the host, too, and copy them to the device of what is indexed
INDEXED = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
_MASKS = (torch.bool, torch.uint8)
_CREATES = (torch.tensor, torch.as_tensor, torch.Tensor.new_tensor)


@dataclass(frozen=True)
class Call:
    """An operation of torch. args, kwargs: its arguments, tensors of the device among them; kwargs
    name the CPU where they named the device. waits: the host of a GPU waits for it. launched: the
    device does it, not the host; gives: its results are on the device.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    waits: bool
    launched: bool
    gives: bool

    @property
    def name(self) -> str:
        return self.func._schema.name


class Machine:
    """What executes operations: the CPU, at once.

    Attributes: `names`: types of torch devices that mean this one. `device`: as tensors name it.
    """

    names: tuple[str, ...] = (NAME,)

    @property
    def device(self) -> torch.device:
        return torch.device(NAME, 0)

    def run(self, call: Call) -> Any:
        """Execute an operation, on this device or on the host; its result in tensors of the CPU."""
        return call.func(*inner(call.args), **inner(call.kwargs))

    def launch(self, name: str, function: Callable[..., Any], *args: Any,
               also: Sequence[torch.Tensor] = (),
               writes: Sequence[torch.Tensor] | None = None, like: Any = None) -> Any:
        """Execute `function` of tensors on the CPU as one kernel; its result as it returns it.

        also: tensors that it takes besides `args`. writes: those of all that it writes; None: those
        whose version says so.
        """
        with EVENTS.paused():
            return function(*args)

    def kernel(self, name: str, args: Sequence[Any]) -> None:
        """A kernel of Triton is launched with these arguments."""

    def made(self, x: OnDevice) -> None:
        """A tensor of the device was made, of `x.inner`."""

    def called(self, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """What is to be passed to a function of torch's interface, before it is called."""
        return args, kwargs

    def pin(self, x: torch.Tensor) -> torch.Tensor:
        """A copy in pinned memory."""
        x = x.clone()
        x.pinned = True  # of torch's own objects, which alone are asked
        return x

    def is_pinned(self, x: torch.Tensor) -> bool:
        return getattr(x, "pinned", False)


class _Present:
    """The machine of this process."""

    machine = Machine()


def machine() -> Machine:
    """What executes operations in this process."""
    return _Present.machine


def use_machine(made: Machine) -> None:
    """Execute all that follows in this process by another machine."""
    _Present.machine = made


class _DeviceEvent:
    """A place in the device's queue. To wait for it is to wait for the device, unless rows have
    left since: then there is work behind it, which nothing waits for.
    """

    def record(self, stream: Any = None) -> None:
        self.launched = EVENTS.launched()

    def synchronize(self) -> None:
        if EVENTS.launched() == self.launched:
            EVENTS.note("read", "event")


class _Backend(backend_registration._DummyBackendModule):
    """What torch asks of a device."""

    Event = _DeviceEvent

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16, torch.float32]

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def current_stream(self, device: Any = None) -> None:
        """There is one queue."""

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)


def register() -> torch.device:
    """Make the device known to torch, once; returns it."""
    if torch._C._get_privateuse1_backend_name() != NAME:
        backend_registration._setup_privateuseone_for_python_backend(
            NAME, backend_module=_Backend())
        if hasattr(torch.ops.aten.mm, "dtype"):  # of GPUs alone, whose sums are float32 as here
            _FOR_CPU.impl("mm.dtype", lambda a, b, dtype: a.to(dtype) @ b.to(dtype), "CPU")
    return torch.device(NAME, 0)


_FOR_CPU = torch.library.Library("aten", "IMPL")


class OnDevice(torch.Tensor):
    """A tensor on the device; `inner` is where its values are."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor, requires_grad: bool = False) -> OnDevice:
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(),
            dtype=inner.dtype, device=torch.device(NAME, 0), requires_grad=requires_grad)
        made.inner = inner
        machine().made(made)
        return made

    def tolist(self) -> Any:
        EVENTS.note("read", "tolist")
        return self.inner.tolist()

    def __repr__(self) -> str:
        return f"OnDevice({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(func, args, kwargs or {})


def inner(value: Any) -> Any:
    """Tensors of the device in lists, tuples and mappings as those on the CPU that they wrap."""
    return mapped(value, lambda x: x.inner if isinstance(x, OnDevice) else x)


def outer(value: Any) -> Any:
    """Tensors on the CPU in lists, tuples and mappings as tensors of the device."""
    return mapped(value, OnDevice)


def mapped(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """torch's `tree_map` takes a third of the time of the tests that use this device."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) in (list, tuple):
        return type(value)([mapped(each, change) for each in value])
    if type(value) is dict:
        return {name: mapped(each, change) for name, each in value.items()}
    if isinstance(value, tuple) and "_fields" in vars(type(value)):  # with names
        return type(value)(*(mapped(each, change) for each in value))
    return value


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Tensors in lists, tuples and mappings."""
    found: list[torch.Tensor] = []
    mapped(value, found.append)
    return found


def _waits(name: str, args: Any, kwargs: Any, here: list[OnDevice],
           host: list[torch.Tensor]) -> tuple[str, str] | None:
    """For what a GPU's host waits: kind and description of an event; None: it does not."""
    waits = not (kwargs.get("non_blocking") or (name == "aten::copy_" and True in args[2:]))
    if name in ("aten::copy_", "aten::_to_copy"):
        source = args[0] if name == "aten::_to_copy" else args[1]
        to_device = _to(kwargs, NAME) if name == "aten::_to_copy" else isinstance(args[0], OnDevice)
        if isinstance(source, OnDevice):
            if not to_device and (name == "aten::copy_" or _to(kwargs, "cpu")):
                target_pinned = name == "aten::copy_" and machine().is_pinned(args[0])
                if waits or not target_pinned:
                    return "read", name
        elif to_device and not (machine().is_pinned(source) and not waits):
            return "pageable", name
        return None
    if here and name in INDEXED:
        return _index_waits(name, args[0], tensors_of(args[1]), tensors_of(args[2:3]))
    if here and any(x.dim() > 0 for x in host):
        raise _mixed(name, host)
    if here and (name in READS or (name == "aten::repeat_interleave"
                                   and kwargs.get("output_size") is None)):
        return "read", name
    return None


def _index_waits(name: str, indexed: torch.Tensor, indices: list[torch.Tensor],
                 values: list[torch.Tensor]) -> tuple[str, str] | None:
    """An index by tensors, which is read or written (`values`).

    What is on the host is copied as `to(device)` does it: from pinned memory the host waits, too.
    torch fills by one mask with one number and waits for nothing; here it counts as other masks do.
    """
    on_host = [x for x in (*indices, *values) if not isinstance(x, OnDevice)]
    if not isinstance(indexed, OnDevice):
        raise _mixed(name, [indexed, *on_host])
    if any(x.dim() > 0 for x in values if not isinstance(x, OnDevice)):
        raise _mixed(name, on_host)
    if any(isinstance(x, OnDevice) and x.dtype in _MASKS for x in indices):
        return "read", f"{name} by a mask"
    return ("pageable", f"{name} by what is on the host") if on_host else None


def _mixed(name: str, host: list[torch.Tensor]) -> RuntimeError:
    return RuntimeError(f"{name}: tensors on {NAME} and on cpu: {[tuple(x.shape) for x in host]}")


def _note_number(indexed: Any, index: Any, value: Any) -> None:
    """torch makes a tensor on the host of a Python number that is written to a GPU by an index."""
    numbers = [x for x in tensors_of(index if isinstance(index, tuple) else (index,))
               if x.dim() > 0 and x.dtype not in _MASKS]
    if isinstance(indexed, OnDevice) and isinstance(value, (int, float)) and numbers:
        EVENTS.note("pageable", "a number written by an index")


def _to(kwargs: Any, kind: str) -> bool:
    device = kwargs.get("device")
    kinds = machine().names if kind == NAME else (kind,)
    return device is not None and torch.device(device).type in kinds


def _call(func: Any, args: Any, kwargs: Any) -> Any:
    name = func._schema.name
    tensors = tensors_of((args, kwargs))
    here = [x for x in tensors if isinstance(x, OnDevice)]
    waits = _waits(name, args, kwargs, here, [x for x in tensors if not isinstance(x, OnDevice)])
    if waits is not None:
        EVENTS.note(*waits)
    to_host = _to(kwargs, "cpu")
    if "device" in kwargs and kwargs["device"] is not None:
        on_device, kwargs = _to(kwargs, NAME), {**kwargs, "device": torch.device("cpu")}
    else:
        on_device = False
    launched = bool(on_device or here)
    gives = launched and not (name == "aten::_local_scalar_dense" or to_host)
    out = machine().run(Call(func, args, kwargs, waits is not None, launched, gives))
    if not gives:
        return out
    if name == "aten::copy_" and not isinstance(args[0], OnDevice):
        return args[0]
    # an operation in place returns its argument
    known = {id(x.inner): x for x in here}
    return mapped(out, lambda x: known[id(x)] if id(x) in known else OnDevice(x))


class HostCalls(TorchFunctionMode):
    """What goes past torch's dispatcher: tensors made of Python numbers, and pinned memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = machine().called(func, args, dict(kwargs or {}))
        if func in _CREATES:
            return self._create(func, args, kwargs)
        if func is torch.Tensor.is_pinned:
            return machine().is_pinned(args[0])
        if func is torch.Tensor.pin_memory:
            return machine().pin(args[0])
        if func is torch.Tensor.__setitem__:
            _note_number(*args)
        if kwargs.pop("pin_memory", False):
            return machine().pin(func(*args, **kwargs))
        return func(*args, **kwargs)

    def _create(self, func: Any, args: Any, kwargs: Any) -> Any:
        like = args[0] if func is torch.Tensor.new_tensor else None
        device = kwargs.get("device", None if like is None else like.device)
        if device is None or torch.device(device).type not in machine().names:
            return func(*args, **kwargs)
        kwargs |= {"device": "cpu"}
        if like is not None:
            func, kwargs = torch.tensor, {"dtype": like.dtype, **kwargs}
            args = args[1:]
        wanted = kwargs.pop("requires_grad", False)
        EVENTS.note("pageable", func.__name__)
        return OnDevice(func(*args, **kwargs), wanted)


class CountingDevice(TorchDispatchMode):
    """Tensors on the device can be made inside; backward inherits it."""

    def __init__(self) -> None:
        super().__init__()
        register()
        self.calls = HostCalls()

    def __enter__(self) -> CountingDevice:
        self.calls.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.calls.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        body = _body_of(func)
        if body is None:
            return _call(func, args, kwargs or {})
        with self:  # an operation of the project: what it is made of is looked at
            return body(*args, **(kwargs or {}))


def _body_of(func: Any) -> Callable[..., Any] | None:
    """The Python function of an operation that the project defines; None: another operation."""
    name = func._schema.name
    if not name.startswith("moe_plugin::"):
        return None
    return torch._library.custom_ops.OPDEFS[name]._init_fn
