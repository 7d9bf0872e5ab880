"""Data loaders and data sets of Megatron's training code, versions 0.15 to 0.19."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


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
