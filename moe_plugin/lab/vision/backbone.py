"""timm's and torchvision's parts that vision needs, imported where they are used."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

# operators that torchvision describes to torch as soon as it is imported
_OPERATORS = "nms", "qnms"
_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_declared: list[torch.library.Library] = []  # torch forgets a library that nothing holds


def optional(module: str) -> Any:
    """A module of timm or torchvision.

    Raises: ValueError: it is not installed; it says what to install.
    """
    try:
        with _apart():
            importlib.import_module("torchvision")
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is not installed; pip install 'moe-plugin[vision]'"
                         ) from error
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
        _declare(error)
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is not installed; pip install 'moe-plugin[vision]'"
                         ) from error


@contextmanager
def _apart() -> Iterator[None]:
    """torchvision's folder of scripts/setup.sh is on the path. Not for longer: processes that are
    started take the path over, and transformers imports what it finds there.
    """
    sys.path.append(str(Path(sys.prefix, "torchvision")))
    try:
        yield
    finally:
        sys.path.pop()


def _declare(error: RuntimeError) -> None:
    """torchvision's own operators cannot be loaded, e.g. those of a build for CUDA beside a torch
    for CPUs. Images and timm's models use none of them: they are declared, and not implemented.
    """
    if not _declared:
        logger.info("torchvision's operators cannot be loaded beside this torch (%s); nothing here "
                    "uses them", error)
        _declared.append(torch.library.Library("torchvision", "FRAGMENT"))
        for name in _OPERATORS:
            _declared[0].define(name + _SCHEMA)
    with _apart():
        importlib.import_module("torchvision")
