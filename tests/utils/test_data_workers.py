"""Processes that read batches and cannot pass them on: torch alone would wait forever."""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, dataloader
from torch.utils.data._utils import worker

from moe_plugin.utils.data_workers import report_lost_batches

FULL = "unable to write to file </torch_1>: No space left on device (28)"
REMEDY = r"through /dev/shm.* KiB are free\. Use --num-workers 0, or .*--shm-size"


class _Unsendable:

    def __reduce__(self) -> tuple[Any, ...]:
        raise RuntimeError(FULL)


class _Data(Dataset[Any]):
    """Items of which the third is `third()`."""

    def __init__(self, third: Any) -> None:
        self.third = third

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return self.third() if index == 2 else torch.tensor(index)


def _fails() -> None:
    raise FileNotFoundError("no such sample")


@pytest.fixture(autouse=True)
def patched(monkeypatch: pytest.MonkeyPatch) -> None:
    loaders = dataloader._MultiProcessingDataLoaderIter
    for owner, name in ((worker, "_worker_loop"), (loaders, "__init__"),
                        (loaders, "_try_get_data")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # restored at the end
    report_lost_batches()


def _batches(third: Any) -> list[Any]:
    return list(DataLoader(_Data(third), batch_size=None, num_workers=2))


def test_all_batches_arrive() -> None:
    assert _batches(lambda: torch.tensor(2)) == [0, 1, 2, 3]


@pytest.mark.parametrize(("third", "said"), [
    (_Unsendable, r"could not pass on a batch \(.*No space left on device"),
    (lambda: os._exit(3), r"ended, or its batch was lost \(.*exited unexpectedly")])
def test_a_lost_batch_ends_the_loop_with_the_remedy(third: Any, said: str) -> None:
    with pytest.raises(ValueError, match=f"{said}.*{REMEDY}"):
        _batches(third)


def test_processes_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch.multiprocessing, "Queue", full)
    with pytest.raises(ValueError, match=f"could not be started.*No space left.*{REMEDY}"):
        _batches(None)


def test_errors_of_a_data_set_are_as_before() -> None:
    with pytest.raises(FileNotFoundError, match="no such sample"):
        _batches(_fails)
