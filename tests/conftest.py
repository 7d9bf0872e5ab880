"""Shared by all tests."""

from __future__ import annotations

import gc

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


def pytest_collection_finish() -> None:
    """What was imported stays: neither garbage collections nor forked ranks need touch it."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """At its end Python clears modules, and some report what they find alive."""
    gc.unfreeze()
