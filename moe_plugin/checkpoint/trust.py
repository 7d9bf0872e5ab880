"""Loading files that others wrote: only plain values and listed classes, so that no code in them
runs.
"""

from __future__ import annotations

import enum
import io
import pickle
from collections.abc import Iterable
from typing import Any

import torch
from torch.serialization import (
    get_safe_globals,
    get_unsafe_globals_in_checkpoint,
    safe_globals,
)

from moe_plugin.messages import short

FLAG = "--trust-checkpoint"


class UntrustedFile(ValueError):
    """A file needs classes that are not listed: loading it could run code."""

    def __init__(self, what: str, classes: Iterable[str]) -> None:
        super().__init__(
            f"{what} holds {short(', '.join(sorted(classes)))}: loading it can run code that is in "
            f"the file, so it is refused; where you know who wrote it, give {FLAG}")


def load(file: Any, allowed: Iterable[Any], what: str, **options: Any) -> Any:
    """`torch.load` of plain values, tensors and `allowed` classes.

    Args:
        file: path or stream.
        allowed: classes and functions that its pickle may name.
        what: what errors call it.
        options: for `torch.load`.
    Raises:
        UntrustedFile: it names others. What `torch.load` raises: it is damaged.
    """
    known = {*get_safe_globals()}
    # leaving `safe_globals` forgets all that it was given, also what others had listed before
    with safe_globals([one for one in allowed if one not in known]):
        try:
            return torch.load(file, **{**options, "weights_only": True})
        except pickle.UnpicklingError as error:
            if isinstance(file, io.IOBase):
                file.seek(0)
            check(file, what, error)
            raise


def check(file: Any, what: str, cause: BaseException | None = None) -> None:
    """`UntrustedFile` where a file of `torch.save` (path or stream) names other classes than those
    in `torch.serialization.safe_globals`; nothing in it runs.
    """
    start = file.tell() if isinstance(file, io.IOBase) else None
    unsafe = get_unsafe_globals_in_checkpoint(file)
    if start is not None:  # for who reads it next: it was left behind the pickle
        file.seek(start)
    if unsafe:
        raise UntrustedFile(what, unsafe) from cause


class Unpickler(pickle.Unpickler):
    """Reads a pickle that may name only listed classes, and members of those that are enums.

    Args:
        stream: the pickle.
        allowed: `module.name` of each class.
        what: what errors call it.
    Raises:
        UntrustedFile: by `load`, it names another one.
    """

    def __init__(self, stream: Any, allowed: Iterable[str], what: str) -> None:
        super().__init__(stream)
        self._allowed, self._what = frozenset(allowed), what

    def find_class(self, module: str, name: str) -> Any:
        """The class, where it is listed; torch's data types are."""
        if f"{module}.{name}" in self._allowed:
            return super().find_class(module, name)
        if module == "torch" and isinstance(torch.__dict__.get(name), torch.dtype):
            return torch.__dict__[name]
        if (module, name) == ("builtins", "getattr"):
            return self._member
        raise UntrustedFile(self._what, [f"{module}.{name}"])

    def _member(self, kind: Any, name: Any) -> Any:
        # Python 3.11.0 to 3.11.3 write a member as getattr(enum, its name), others as enum(value)
        if isinstance(kind, enum.EnumMeta) and isinstance(name, str) and name in kind.__members__:
            return kind[name]
        raise UntrustedFile(self._what, ["builtins.getattr"])
