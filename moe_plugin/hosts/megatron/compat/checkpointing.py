"""Changes to `megatron.core.dist_checkpointing`: its functions can be wrapped, the common state can
be modified while it is loaded, and writer processes exit when the rank that started them exits.

Megatron's writers pass their results through a queue, which is served by a separate process. The
queue process uses 280 MB of memory, and waits for its rank without a timeout. If both the rank and
the launcher are killed, the queue process keeps running. (torchrun terminates the process if
torchrun itself is still running.) A synchronous save does not need the queue process. In older
versions (0.16), forked copies of the rank write the files. Forked writers keep running if they wait
to send more data than fits into the buffer of a pipe.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch.distributed.checkpoint.api import CheckpointException

from moe_plugin.utils.machine import die_with_parent
from moe_plugin.utils.replaced import replaced

Around = Callable[[Callable[..., Any], dict[str, Any]], Any]


def wrap(name: str, around: Around) -> None:
    """Replace a function with `around(original, given)` until the process ends.

    A second call with the same `around` has no effect.

    name: name of the function in `megatron.core.dist_checkpointing`.
    around: function that is called with the original function and a dict. The dict maps parameter
        names to the arguments of the call.
    """
    original = getattr(dist_checkpointing, name)
    if is_wrapped(name, around):
        return
    signature = inspect.signature(original)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return around(original, signature.bind(*args, **kwargs).arguments)

    call.around = (*getattr(original, "around", ()), around)  # type: ignore[attr-defined]
    setattr(dist_checkpointing, name, call)


def is_wrapped(name: str, around: Around) -> bool:
    """Return True if `wrap` has already been called with these arguments."""
    return around in getattr(getattr(dist_checkpointing, name), "around", ())


_PACKAGE = "megatron.core.dist_checkpointing"
Change = Callable[[dict[str, Any]], dict[str, Any]]


@contextmanager
def changed(change: Change, strategy_given: bool) -> Iterator[dict[str, Any]]:
    """Inside the block, make `dist_checkpointing.load` use the common state that `change` returns.

    `load` must be called with the keyword arguments that this context manager yields.

    Up to Megatron 0.17, a strategy object loads the common state. From Megatron 0.18 on, the common
    state is loaded by a function in the module that defines `load`. The function is named
    `load_common` in Megatron 0.18 and `load_common_state_dict` in Megatron 0.19.

    strategy_given: True if the caller passes its own strategy to `load`. If True, `change` has no
        effect up to Megatron 0.17.
    """
    common = importlib.import_module(f"{_PACKAGE}.strategies.common")
    base = getattr(common, "TorchCommonLoadStrategy", None)  # absent from 0.18 on
    if base is not None:
        yield {} if strategy_given else {"common_strategy": _strategy(base, change)}
        return
    module = importlib.import_module(f"{_PACKAGE}.serialization")
    names = module.load.__code__.co_names
    name = "load_common_state_dict" if "load_common_state_dict" in names else "load_common"
    original = getattr(module, name)
    with replaced(module, **{name: lambda folder: change(original(folder))}):
        yield {}


def _strategy(base: type, change: Change) -> Any:

    class Changed(base):  # type: ignore[misc]

        def load_common(self, checkpoint_dir: Any) -> Any:
            return change(super().load_common(checkpoint_dir))

    return Changed()


_thread = threading.local()  # attribute `parent`: id of this process while this thread saves


def _after_fork() -> None:
    # in a fork only the forking thread exists, with its thread-local values
    parent = getattr(_thread, "parent", None)
    if parent is not None:
        die_with_parent(parent)


os.register_at_fork(after_in_child=_after_fork)


@contextlib.contextmanager
def writers_end_with_us() -> Iterator[None]:
    """Inside the block, make the processes of a synchronous save exit with the current process."""
    with (replaced(filesystem_async, _results_queue=queue.Queue()),
          replaced(_thread, parent=os.getpid())):
        yield


def saves_whose_writers_end(save: Callable[..., Any], given: dict[str, Any]) -> Any:
    """Call `dist_checkpointing.save` so that its writer processes exit when the current process
    exits.

    Asynchronous saves (`--async-save`) are passed through unchanged.
    """
    if given.get("async_sharded_save"):
        return save(**given)
    with writers_end_with_us(), _causes() as failed:
        try:
            return save(**given)
        except CheckpointException as error:
            if failed:
                raise failed[0] from error
            raise


@contextlib.contextmanager
def _causes() -> Iterator[list[Exception]]:
    """Yield a list to which the errors of the current rank's writers are appended.

    Megatron itself reports only the class of each error.
    """
    writer, failed = filesystem_async.FileSystemWriterAsync, list[Exception]()
    write = writer.write_preloaded_data

    @functools.wraps(write)
    def noted(*args: Any, **kwargs: Any) -> Any:
        output = write(*args, **kwargs)
        if output is not None and isinstance(output[1], Exception):
            failed.append(output[1])
        return output

    with replaced(writer, write_preloaded_data=staticmethod(noted)):
        yield failed
