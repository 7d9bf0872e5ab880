"""All-to-all algorithms: what one is, and the registry in which each declares what it needs and
what it costs. A new one is one file: it is registered, and `auto`, the planner and the log know it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor

from moe_plugin.comm.base import Comm
from moe_plugin.planner.all_to_all_cost import COSTS
from moe_plugin.planner.all_to_all_cost.phases import CostModel
from moe_plugin.utils.registry import Registry

Algorithm = TypeVar("Algorithm", bound=Callable[..., Any])


class Exchange(ABC):
    """An all-to-all. One object serves all groups: state of a group is in `Comm.state`.

    Attributes:
        in_background: whether it may run in another thread or on a side stream while the rank
            computes.
        direct: the name under which its calls are counted, where it is one message from every rank
            to every other, so that it needs no thread to run in the background; None: it is not.
        rounds: of messages, one after another. `auto` tries algorithms with fewer first; a later
            one must be clearly faster.
    """

    in_background: bool = True
    direct: str | None = None
    rounds: int = 1

    @abstractmethod
    def __call__(self, comm: Comm, x: Tensor, send: Sequence[int] | None = None,
                 recv: Sequence[int] | None = None) -> Tensor:
        """Exchange rows of `x` along dimension 0, see `Comm.all_to_all`. All ranks call it."""

    @property
    def back(self) -> Exchange:
        """By which rows come back from their experts, and gradients of those that this one sends
        there; whose `back` is this one. Itself where both ways are alike.
        """
        return self

    def resolve(self, comm: Comm, x: Tensor, send: Sequence[int] | None,
                recv: Sequence[int] | None) -> Exchange:
        """What runs for this call. Called in program order on all ranks, so it may be collective.

        Args: as for the exchange itself; `x` is only looked at for its shape and dtype.
        """
        return self

    def lacks(self, comm: Comm) -> str | None:
        """What it needs and a prepared group lacks, so that `linear` runs in its place; None:
        nothing.
        """
        return None

    def tried(self, comm: Comm) -> bool:
        """Whether `auto` may choose it in a prepared group."""
        return False


class FunctionExchange(Exchange):
    """A plain function `(comm, x, send, recv) -> rows` as an `Exchange`."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function = function
        self.__doc__ = function.__doc__  # the summary in lists of algorithms

    def __call__(self, comm: Comm, x: Tensor, send: Sequence[int] | None = None,
                 recv: Sequence[int] | None = None) -> Tensor:
        return self.function(comm, x, send, recv)


class RegisteredExchange(FunctionExchange):
    """A function with what it declares, see `ExchangeRegistry.register`: its calls are counted, and
    `linear` runs in its place where it lacks something.
    """

    def __init__(self, function: Callable[..., Tensor], name: str, *, direct: bool, rounds: int,
                 lacks: Callable[[Comm], str | None], tried: Callable[[Comm], bool]) -> None:
        super().__init__(function)
        self.name, self.rounds, self._lacks, self._tried = name, rounds, lacks, tried
        self.direct = name if direct else None

    def __call__(self, comm: Comm, x: Tensor, send: Sequence[int] | None = None,
                 recv: Sequence[int] | None = None) -> Tensor:
        if self._lacks(comm):
            return algorithms.get("linear")(comm, x, send, recv)
        comm.counters.exchange(self.name)
        return self.function(comm, x, send, recv)

    def lacks(self, comm: Comm) -> str | None:
        return self._lacks(comm)

    def tried(self, comm: Comm) -> bool:
        return self._lacks(comm) is None and self._tried(comm)


# functions with names: a layer that holds a registered algorithm is pickled
def _nothing(comm: Comm) -> None:
    return None


def _everywhere(comm: Comm) -> bool:
    return True


def several_nodes(comm: Comm) -> str | None:
    """For `lacks`: what a hierarchical algorithm needs and a group has not."""
    return comm.topology.why_flat()


class ExchangeRegistry(Registry[Exchange]):
    """All-to-all algorithms by name: `Exchange` objects, or plain functions, which become one."""

    def register(self, name: str, *, direct: bool = False, rounds: int = 1,
                 lacks: Callable[[Comm], str | None] = _nothing,
                 tried: Callable[[Comm], bool] = _everywhere, cost: CostModel | None = None,
                 **options: Any) -> Callable[[Algorithm], Algorithm]:
        """Decorator: `@algorithms.register("mine")` on a function `(comm, x, send, recv) -> rows`.

        It returns what it decorates; `get` returns the `Exchange`. An `Exchange` object declares
        all but `cost` itself.

        Args:
            direct, rounds, lacks, tried: see `Exchange`.
            cost: by which the planner predicts it; None: it is measured only, or predicted by a
                file of its own in `planner.all_to_all_cost`, which programs without torch read.
        Raises:
            ValueError: the name is taken.
            TypeError: neither an `Exchange` nor a function.
        """
        add = super().register(name, **options)

        def checked(value: Algorithm) -> Algorithm:
            if isinstance(value, type) or not callable(value):
                raise TypeError(f"all_to_all {name!r} is {value!r}; register an Exchange object or "
                                "a function (comm, x, send, recv) -> rows")
            add(value if isinstance(value, Exchange) else RegisteredExchange(
                value, name, direct=direct, rounds=rounds, lacks=lacks, tried=tried))
            if cost is not None:
                COSTS[name] = cost
            return value

        return checked

    def candidates(self, comm: Comm) -> list[str]:
        """Those that `auto` may choose from in a prepared group, the one with fewest rounds first.
        """
        found = [entry for entry in self if entry.offered and entry.value.tried(comm)]
        found.sort(key=lambda entry: (entry.value.rounds, entry.name != "linear"))
        return [entry.name for entry in found]

    def left_out(self, comm: Comm) -> dict[str, list[str]]:
        """By what they lack in a prepared group, those that run as `linear` there."""
        reasons: dict[str, list[str]] = {}
        for entry in self:
            if entry.offered and (reason := entry.value.lacks(comm)):
                reasons.setdefault(reason, []).append(entry.name)
        return reasons


algorithms = ExchangeRegistry("all_to_all")
