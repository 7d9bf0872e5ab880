"""The base class `Exchange` of all-to-all algorithms, and a registry with the requirements and the
cost of each algorithm.

To add an algorithm, write a file that registers it. `auto`, the planner and the log then use the
new algorithm automatically.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor

from moe_plugin.comm.base import Comm
from moe_plugin.planner.all_to_all_cost import COSTS, CostModel
from moe_plugin.utils.registry import Registry

Algorithm = TypeVar("Algorithm", bound=Callable[..., Any])


class Exchange(ABC):
    """An all-to-all algorithm.

    All groups use the same `Exchange` object. A group's state is stored in `Comm.state`.

    Attributes:
        in_background: whether the exchange may run in another thread or stream during computation.
        direct: name used to count calls of an algorithm in which every rank sends one message to
            every other rank, or None for all other algorithms. A direct algorithm can run in the
            background without a thread.
        rounds: number of consecutive rounds of messages in the algorithm. `auto` first tries the
            algorithms with the fewest rounds. An algorithm with more rounds is chosen only if it is
            clearly faster.
    """

    in_background: bool = True
    direct: str | None = None
    rounds: int = 1

    @abstractmethod
    def __call__(self, comm: Comm, x: Tensor, send: Sequence[int] | None = None,
                 recv: Sequence[int] | None = None) -> Tensor:
        """Exchange rows of `x`; see `Comm.all_to_all`. All ranks must call this method."""

    @property
    def back(self) -> Exchange:
        """The exchange in the opposite direction, which sends back the experts' outputs and the
        gradients of the rows that this exchange sent.

        `exchange.back.back` is the exchange itself. By default, both directions use the same
        exchange.
        """
        return self

    def resolve(self, comm: Comm, x: Tensor, send: Sequence[int] | None,
                recv: Sequence[int] | None) -> Exchange:
        """Return the exchange to use for one call. All ranks call this method in program order, so
        the method may call collectives.

        The arguments are the same as for the exchange itself. Only the shape and dtype of `x`
        matter.
        """
        return self

    def lacks(self, comm: Comm) -> str | None:
        """Return the first requirement that a prepared group does not meet, or None if the group
        meets all requirements. If this method returns a requirement, `linear` runs instead of this
        algorithm.
        """
        return None

    def tried(self, comm: Comm) -> bool:
        """Return whether `auto` may choose this algorithm in a prepared group."""
        return False


class FunctionExchange(Exchange):
    """An `Exchange` that calls a plain function `(comm, x, send, recv) -> rows`."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function = function
        self.__doc__ = function.__doc__  # lists of algorithms show the docstring

    def __call__(self, comm: Comm, x: Tensor, send: Sequence[int] | None = None,
                 recv: Sequence[int] | None = None) -> Tensor:
        return self.function(comm, x, send, recv)


class RegisteredExchange(FunctionExchange):
    """A registered function with its properties; see `ExchangeRegistry.register`.

    Calls are counted. If the group does not meet a requirement of the algorithm, `linear` runs
    instead.
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


# Named functions rather than lambdas, because a layer with a registered algorithm can be pickled.
def _nothing(comm: Comm) -> None:
    return None


def _everywhere(comm: Comm) -> bool:
    return True


def several_nodes(comm: Comm) -> str | None:
    """Return the reason why a hierarchical algorithm cannot be faster than a flat algorithm in a
    group, or None. Pass this function as the `lacks` argument of `register`.
    """
    return comm.topology.why_flat()


class ExchangeRegistry(Registry[Exchange]):
    """A registry of all-to-all algorithms by name. A plain function is wrapped in an `Exchange`
    object when it is registered.
    """

    def register(self, name: str, *, direct: bool = False, rounds: int = 1,
                 lacks: Callable[[Comm], str | None] = _nothing,
                 tried: Callable[[Comm], bool] = _everywhere, cost: CostModel | None = None,
                 **options: Any) -> Callable[[Algorithm], Algorithm]:
        """Register an algorithm, which is either an `Exchange` object or a function
        `(comm, x, send, recv) -> rows`.

        The decorator returns the decorated object unchanged, whereas `get` returns an `Exchange`
        object. If the decorated object is an `Exchange`, then `direct`, `rounds`, `lacks` and
        `tried` are ignored, because the object itself defines them.

        Args:
            name: registered name of the algorithm.
            direct: see `Exchange`. `direct` is a boolean here, because calls are counted under
                `name`.
            rounds: see `Exchange`.
            lacks: see `Exchange`.
            tried: see `Exchange`.
            cost: optional. Cost model that the planner uses to predict the time of the algorithm.
                By default, the cost model is read from a file in `planner.all_to_all_cost`. If no
                file defines one, the algorithm's time is only measured and never predicted.
                Programs that do not import torch can also read such a file.
            options: see `Registry.register`.
        Raises:
            ValueError: If the name is already registered.
            TypeError: If the decorated object is neither an `Exchange` nor a function.
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
        """Return the names of the algorithms that `auto` may choose in a prepared group. Algorithms
        with the fewest rounds come first.
        """
        entries = [entry for entry in self if entry.offered and entry.value.tried(comm)]
        entries.sort(key=lambda entry: (entry.value.rounds, entry.name != "linear"))
        return [entry.name for entry in entries]

    def left_out(self, comm: Comm) -> dict[str, list[str]]:
        """Return the algorithms that `linear` replaces in a group, by unmet requirement."""
        reasons: dict[str, list[str]] = {}
        for entry in self:
            if entry.offered and (reason := entry.value.lacks(comm)):
                reasons.setdefault(reason, []).append(entry.name)
        return reasons


algorithms = ExchangeRegistry("all_to_all")
