"""`LayoutChoice`: the one record that settings fix, the planner predicts, the tuner measures and
the report explains.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from moe_plugin.registry import Registry


@dataclass(frozen=True, order=True, kw_only=True)
class LayoutChoice:
    """How one layer runs one step.

    r: 0: every rank gathers all experts' parameters and computes its own tokens, no all-to-all
        (Tutel's data parallelism). r >= 1: every token goes to r ranks, each of which holds 1/r of
        the expert's inner width after gathering what it lacks. Where there are at least as many
        experts as ranks, 0 and 1 are all there is.
    d: pieces in which rows travel and are computed (Tutel's pipelining degree); 1: no overlap.
    d_backward: the same for backward; 0: d.
    algorithm: all-to-all algorithm by registered name. kernel: expert compute by registered name.
    """

    r: int
    d: int = 1
    d_backward: int = 0
    algorithm: str = "linear"
    kernel: str = "auto"

    def __post_init__(self) -> None:
        for name, bound in (("r", 0), ("d", 1), ("d_backward", 0)):
            if getattr(self, name) < bound:
                raise ValueError(
                    f"layout {name}={getattr(self, name)} is out of bounds: must be >= {bound}; "
                    "see docs/adaptive.md"
                )

    @property
    def backward_d(self) -> int:
        """Pieces in backward."""
        return self.d_backward or self.d

    @property
    def label(self) -> str:
        """Short text for logs and plots, e.g. `r=1 d=2 2dh auto`."""
        back = f"/{self.d_backward}" if self.d_backward and self.d_backward != self.d else ""
        return f"r={self.r} d={self.d}{back} {self.algorithm} {self.kernel}"

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LayoutChoice:
        """The inverse of `as_dict`."""
        return cls(**values)


def divisors(n: int) -> list[int]:
    """All divisors, ascending."""
    return [i for i in range(1, n + 1) if n % i == 0]


layouts: Registry[Callable[[int], list[int]]] = Registry("layout")


@layouts.register("gathered")
def gathered(shards: int) -> list[int]:
    """r = 0: all parameters are gathered, tokens stay (data parallelism; no all-to-all)."""
    return [0]


@layouts.register("whole")
def whole(shards: int) -> list[int]:
    """r = 1: tokens go to their expert's ranks, which gather its slices and share its tokens
    (expert and data parallelism).
    """
    return [1]


@layouts.register("sliced")
def sliced(shards: int) -> list[int]:
    """r > 1, a divisor of S = ranks / experts: a token goes to r ranks, each with 1/r of the
    expert's width (expert and model parallelism).
    """
    return divisors(shards)[1:]


def legal_r(experts: int, ranks: int, shards: int | None = None) -> list[int]:
    """0 and every divisor of S. shards: S; None: W/E where there are fewer experts than ranks, else
    1. One rank: 1.
    """
    if ranks == 1:
        return [1]
    if shards is None and experts % ranks and ranks % experts:
        raise ValueError(
            f"num_experts={experts} does not fit {ranks} expert-parallel ranks: must be a multiple "
            f"or a divisor of {ranks}"
        )
    shards = shards or max(1, ranks // experts)
    return sorted(r for layout in layouts for r in layout.value(shards))


def legal_choices(experts: int, ranks: int, *, degrees: Iterable[int] = (1, 2, 4, 8),
                  algorithms: Iterable[str] = ("linear",), kernels: Iterable[str] = ("auto",),
                  backward_degrees: Iterable[int] = (0,),
                  shards: int | None = None) -> Iterator[LayoutChoice]:
    """Every choice that makes sense on `ranks` ranks, experts cut in `shards` (None: see
    `legal_r`): r = 0 has no all-to-all to overlap, one rank has nothing to send.
    """
    degrees, algorithms, backward = list(degrees), list(algorithms), list(backward_degrees)
    for kernel in kernels:
        for r in legal_r(experts, ranks, shards):
            still = r == 0 or ranks == 1
            for algorithm in algorithms[:1] if still else algorithms:
                for d in [1] if still else degrees:
                    for back in [0] if still else backward:
                        yield LayoutChoice(r=r, d=d, d_backward=0 if back == d else back,
                                           algorithm=algorithm, kernel=kernel)
