"""Changes to the data loaders and datasets of Megatron's training code, versions 0.15 to 0.19."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from moe_plugin.utils.replaced import replaced


def refuse_empty_splits() -> None:
    """Until the process ends, make Megatron raise a `ValueError` for a dataset without documents.

    An empty dataset is still allowed if no samples are requested from it. For an empty dataset,
    Megatron 0.15 to 0.19 would otherwise enter an endless loop: it repeats the documents until
    there are enough samples.
    """
    datasets = importlib.import_module("megatron.core.datasets.gpt_dataset")
    native = datasets.GPTDataset._get_num_epochs

    def number(self: Any, tokens: int) -> int:
        if tokens:
            return native(self, tokens)
        if self.num_samples:
            raise ValueError(
                f"split={self.config.split!r} leaves no document for the {self.index_split.name} "
                "set, because only whole documents are assigned. Provide more documents (separated "
                "by blank lines), or use another --split or --eval-iters 0.")
        return 1

    datasets.GPTDataset._get_num_epochs = number


def replace_tokenizer_builder(replace: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace the function that builds a tokenizer from a metadata file.

    This function does nothing in Megatron 0.15, which does not support metadata files.
    """
    with suppress(ImportError):
        tokenizers = importlib.import_module("megatron.core.tokenizers.megatron_tokenizer")
        built = tokenizers.MegatronTokenizer
        built.from_pretrained = replace(built.from_pretrained)


def split_of(dataset: Any) -> str | None:
    """Return the name of the split to which a dataset belongs, or None if the split has no name."""
    split = getattr(dataset, "split", None) or getattr(dataset, "index_split", None)
    return getattr(split, "name", None)


@contextmanager
def of_all_ranks(build: Callable[..., Any], dataset: Any) -> Iterator[None]:
    """Inside the block, make `build_pretraining_data_loader` return the micro-batches of all ranks.

    Every rank receives the training micro-batches of all ranks, in an order that alternates between
    the ranks. This is needed for steps in which several ranks compute the same micro-batches.
    Megatron 0.15 to 0.19 reads the rank and the number of ranks from `parallel_state`. Inside the
    block, the rank is 0 and the number of ranks is 1.
    """
    if split_of(dataset) not in (None, "train"):
        yield
        return
    module: Any = sys.modules[build.__module__]
    if not hasattr(module, "mpu"):
        raise ValueError(
            f"{build.__module__} does not read ranks in the same way as in megatron-core 0.15 to "
            "0.19. Install one of these versions, or leave out guard.votes.")
    with replaced(module, mpu=_OneRank(module.mpu)):
        yield


class _OneRank:

    def __init__(self, native: Any) -> None:
        self._native = native

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    def get_data_parallel_rank(self, *_: Any, **__: Any) -> int:
        return 0

    def get_data_parallel_world_size(self, *_: Any, **__: Any) -> int:
        return 1
