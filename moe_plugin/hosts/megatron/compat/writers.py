"""Processes that write Megatron's checkpoints end with the rank that started them.

Megatron's writers hand their results over in a queue that has a process of its own, of 280 MB,
which waits for its rank without a limit: it stays where rank and launcher are killed (while
torchrun runs, it ends this process). A save that the rank waits for does not need it. In older
versions (0.16) forks of the rank write the files; they stay where they wait to hand over more than
a pipe holds.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch.distributed.checkpoint.api import CheckpointException

from moe_plugin.utils.machine import die_with_parent


# Data loaders and data sets of Megatron's training code, versions 0.15 to 0.19.
def refuse_empty_splits() -> None:
    """Let a data set without a document end in a `ValueError`; where no sample of it is asked for,
    it is empty. Stays for the life of the process.

    0.15 to 0.19: it is counted over and over, until it has enough samples: forever.
    """
    datasets = importlib.import_module("megatron.core.datasets.gpt_dataset")
    native = datasets.GPTDataset._get_num_epochs

    def number(self: Any, tokens: int) -> int:
        if tokens:
            return native(self, tokens)
        if self.num_samples:
            raise ValueError(
                f"split={self.config.split!r} leaves no document for the {self.index_split.name} "
                "set, because whole documents are split: give more documents (blank lines end "
                "them), another --split, or --eval-iters 0")
        return 1

    datasets.GPTDataset._get_num_epochs = number


def split_of(dataset: Any) -> str | None:
    """Name of the split that a data set is of; None: it does not say."""
    split = getattr(dataset, "split", None) or getattr(dataset, "index_split", None)
    return getattr(split, "name", None)


@contextmanager
def of_all_ranks(build: Callable[..., Any], dataset: Any) -> Iterator[None]:
    """Inside, `build_pretraining_data_loader` gives every rank the micro-batches of all ranks, by
    turns, of a training set: for steps in which each rank computes what others have, too.

    0.15 to 0.19: the function asks `parallel_state` for this rank and their number.
    """
    if split_of(dataset) not in (None, "train"):
        yield
        return
    module = vars(sys.modules[build.__module__])
    if "mpu" not in module:
        raise ValueError(
            f"{build.__module__} takes ranks from elsewhere than in megatron-core 0.15 to 0.19: "
            "install one of these, or leave out steps in which ranks compute what others have "
            "(guard.votes)")
    native, module["mpu"] = module["mpu"], _OneRank(module["mpu"])
    try:
        yield
    finally:
        module["mpu"] = native


class _OneRank:

    def __init__(self, native: Any) -> None:
        self._native = native

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    def get_data_parallel_rank(self, *_: Any, **__: Any) -> int:
        return 0

    def get_data_parallel_world_size(self, *_: Any, **__: Any) -> int:
        return 1


_PACKAGE = "megatron.core.dist_checkpointing"
Change = Callable[[dict[str, Any]], dict[str, Any]]


@contextmanager
def changed(change: Change, strategy_given: bool) -> Iterator[dict[str, Any]]:
    """Inside, `dist_checkpointing.load` gets the common state as `change` returns it, if it is
    called with the keyword arguments that the block gets.

    Up to 0.17 a strategy object loads the common state; from 0.18 on a function does, which `load`
    finds in its own module: `load_common` in 0.18, `load_common_state_dict` in 0.19.

    strategy_given: the caller passes a strategy of its own; nothing is changed then.
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
    setattr(module, name, lambda folder: change(original(folder)))
    try:
        yield {}
    finally:
        setattr(module, name, original)


def _strategy(base: type, change: Change) -> Any:

    class Changed(base):  # type: ignore[misc]

        def load_common(self, checkpoint_dir: Any) -> Any:
            return change(super().load_common(checkpoint_dir))

    return Changed()


Around = Callable[[Callable[..., Any], dict[str, Any]], Any]


def wrap(name: str, around: Around) -> None:
    """Let `around(original, given)` be called in place of one of these functions, once for each
    `around`; stays for the life of the process.

    given: the call's arguments, by their names in Megatron.
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
    """Whether `wrap` has been called with these."""
    return around in getattr(getattr(dist_checkpointing, name), "around", ())


_QUEUE = "_results_queue"
_thread = threading.local()  # parent: id of this process while this thread saves


def _after_fork() -> None:
    # a fork has the thread that made it alone, with its values
    parent = getattr(_thread, "parent", None)
    if parent is not None:
        die_with_parent(parent)


os.register_at_fork(after_in_child=_after_fork)


@contextlib.contextmanager
def writers_end_with_us() -> Iterator[None]:
    """Inside, a save that is waited for starts no process that outlives this one."""
    kept = vars(filesystem_async).get(_QUEUE)
    setattr(filesystem_async, _QUEUE, queue.Queue())
    _thread.parent = os.getpid()
    try:
        yield
    finally:
        _thread.parent = None
        setattr(filesystem_async, _QUEUE, kept)


def saves_whose_writers_end(save: Callable[..., Any], given: dict[str, Any]) -> Any:
    """Around `dist_checkpointing.save`: its writers end with this process, except of a save that is
    not waited for (`--async-save`).
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
    """The errors of this rank's writers: Megatron puts the class of an error in their place."""
    writer, failed = filesystem_async.FileSystemWriterAsync, list[Exception]()
    write = writer.write_preloaded_data

    @functools.wraps(write)
    def noted(*args: Any, **kwargs: Any) -> Any:
        output = write(*args, **kwargs)
        if output is not None and isinstance(output[1], Exception):
            failed.append(output[1])
        return output

    writer.write_preloaded_data = staticmethod(noted)
    try:
        yield failed
    finally:
        writer.write_preloaded_data = staticmethod(write)
