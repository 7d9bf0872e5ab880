"""A dispatch mode that counts the bytes of all living tensors."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class AliveBytes(TorchDispatchMode):
    """A dispatch mode that counts the bytes of all storages created by operators while the mode is
    active.

    Attributes:
        now: current number of bytes.
        peak: largest number of bytes so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (),
                           kwargs: Any = None) -> Any:
        """Count the storages of the tensors that an operator returns."""
        result = self.compute(func, args, kwargs or {})
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, Tensor):
                self._add(x.untyped_storage())
        return result

    def compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator. Subclasses can replace the results of operators."""
        return func(*args, **kwargs)

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Exclude the given tensors, which exist throughout the measurement."""
        self._seen |= {x.untyped_storage()._cdata for x in tensors}

    def _add(self, storage: Any) -> None:
        key = storage._cdata
        if key not in self._seen:
            self._seen.add(key)
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._gone, key, storage.nbytes())

    def _gone(self, key: int, nbytes: int) -> None:
        self._seen.discard(key)
        self.now -= nbytes
