"""`LayoutChoice`: the record that settings fix, the planner predicts and the tuner measures."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_plugin.planner.spill import POLICIES

DEGREES = (1, 2, 4, 8)  # values of d that a search tries
SENDS = ("rows", "ranks", "nodes")


@dataclass(frozen=True, order=True, kw_only=True)
class LayoutChoice:
    """How one layer runs one step.

    Attributes:
        r: routing degree. 0: every rank gathers all experts' parameters and computes its own
            tokens, no all-to-all (data parallelism in Tutel). r >= 1: every token goes to r
            ranks, each of which has 1/r of the expert's inner width after gathering what it
            lacks; r = 1: expert and data parallelism, r > 1: expert and model parallelism. With
            at least as many experts as ranks only 0 and 1 exist.
        d: overlap degree, pieces in which rows travel and are computed; 1: no overlap.
        d_backward: the same for backward; 0: d.
        algorithm: all-to-all algorithm by registered name.
        kernel: expert compute by registered name.
        piece_axis: how pieces are made, by `rows`, `experts` or `peers`; without effect where d
            is 1.
        gather_tokens: every rank gets all tokens of the group and computes its own experts'
            rows, no all-to-all (dispatcher all_gather); parameters stay where they are stored.
        spill: which ranks compute rows of overloaded experts, one of `planner.spill.POLICIES`;
            only where every token goes to all slices of its expert (the largest r).
        send: how often a token's row travels, one of `SENDS`: once for each of its experts, once to
            each rank, or once to each node that has some.
    """

    r: int
    d: int = 1
    d_backward: int = 0
    algorithm: str = "linear"
    kernel: str = "auto"
    gather_tokens: bool = False
    piece_axis: str = "rows"
    spill: str = "never"
    send: str = "rows"

    @property
    def exchanges(self) -> bool:
        """Whether rows travel by all-to-all."""
        return self.r > 0 and not self.gather_tokens

    def __post_init__(self) -> None:
        for name, bound in (("r", 0), ("d", 1), ("d_backward", 0)):
            if getattr(self, name) < bound:
                raise ValueError(
                    f"layout {name}={getattr(self, name)} is out of bounds: must be >= {bound}; "
                    "see docs/adaptive.md"
                )
        if self.spill not in POLICIES:
            raise ValueError(f"layout spill={self.spill!r} is not one of {', '.join(POLICIES)}; "
                             "see docs/overload.md")
        if self.send not in SENDS:
            raise ValueError(f"layout send={self.send!r} is not one of {', '.join(SENDS)}; "
                             "see docs/once.md")

    @property
    def backward_d(self) -> int:
        """Pieces in backward."""
        return self.d_backward or self.d

    @property
    def words(self) -> str:
        """What happens in words, for logs: how rows and weights meet, in how many pieces."""
        if self.gather_tokens:
            parts = ["tokens gathered on all ranks, no all-to-all"]
        elif not self.r:
            parts = ["experts' weights gathered, no all-to-all"]
        else:
            each = f", each to {self.r} ranks" * (self.r > 1)
            once = "" if self.send == "rows" else f", once to each {self.send[:-1]}"
            parts = [f"tokens sent by all-to-all {self.algorithm}{each}{once}"]
        pieces = f"{self.d} pieces along {self.piece_axis}"
        parts.append("one piece" if self.d == 1 else pieces)
        if self.backward_d != self.d:
            parts.append(f"{self.backward_d} in backward")
        if self.kernel != "auto":
            parts.append(f"expert compute {self.kernel}")
        if self.spill != "never":
            parts.append(f"rows of overloaded experts spill ({self.spill})")
        return ", ".join(parts)

    @property
    def label(self) -> str:
        """Short text for statistics and plots, e.g. `r=1 d=2 2dh auto`; later fields only where
        they are not the default.
        """
        back = f"/{self.d_backward}" if self.d_backward and self.d_backward != self.d else ""
        more = (f" {f.name}={getattr(self, f.name)}" for f in dataclasses.fields(self)[5:]
                if getattr(self, f.name) != f.default)
        return f"r={self.r} d={self.d}{back} {self.algorithm} {self.kernel}" + "".join(more)

    def __str__(self) -> str:
        return self.label

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_label(cls, text: str) -> LayoutChoice:
        """The inverse of `label`. `ValueError`: the text is none."""
        try:
            r, pieces, algorithm, kernel, *more = text.split(" ")
            d, _, back = pieces.removeprefix("d=").partition("/")
            named = dict(pair.split("=") for pair in more)
            gather = named.pop("gather_tokens", "False") == "True"
            return cls(r=int(r.removeprefix("r=")), d=int(d), d_backward=int(back or 0),
                       algorithm=algorithm, kernel=kernel, gather_tokens=gather, **named)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{text[:80]!r} is not the label of a layout, such as "
                             "'r=1 d=2 linear auto'") from error

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LayoutChoice:
        """The inverse of `as_dict`."""
        return cls(**values)


def divisors(n: int) -> list[int]:
    """All divisors, ascending."""
    small = [i for i in range(1, math.isqrt(n) + 1) if n % i == 0]
    return sorted({*small, *(n // i for i in small)})


def legal_r(experts: int, ranks: int, shards: int | None = None) -> list[int]:
    """All values of r: 0 and every divisor of S; on one rank 1.

    shards: S, ranks per expert; None: W/E with fewer experts than ranks, else 1.
    """
    if ranks == 1:
        return [1]
    if shards is None and experts % ranks and ranks % experts:
        raise ValueError(
            f"num_experts={experts} does not fit {ranks} expert-parallel ranks: must be a multiple "
            f"or a divisor of {ranks}"
        )
    shards = shards or max(1, ranks // experts)
    return [0, *divisors(shards)]


def legal_choices(experts: int, ranks: int, *, degrees: Iterable[int] = DEGREES,
                  algorithms: Iterable[str] = ("linear",), kernels: Iterable[str] = ("auto",),
                  backward_degrees: Iterable[int] = (0,), sends: Iterable[str] = ("rows",)
                  ) -> Iterator[LayoutChoice]:
    """Every sensible choice on `ranks` ranks."""
    values = {
        "kernel": kernels, "r": legal_r(experts, ranks), "algorithm": algorithms,
        "d": degrees, "d_backward": backward_degrees, "send": sends
    }
    yield from combinations({name: list(v) for name, v in values.items()}, ranks)


def combinations(values: Mapping[str, Sequence[Any]], ranks: int) -> Iterator[LayoutChoice]:
    """Every choice with these values by field.

    Without an all-to-all (r = 0, gathered tokens, one rank) there is nothing to overlap: only one
    algorithm and d = 1 remain, and nothing to spill. Tokens are gathered where parameters are
    stored, and rows spilled, at the largest r. What is sent once is not cut by experts.
    """
    made = {}
    for row in itertools.product(*values.values()):
        choice = LayoutChoice(**dict(zip(values, row, strict=True)))
        if choice.gather_tokens:
            choice = dataclasses.replace(choice, r=max(values["r"]), gather_tokens=ranks > 1)
        if not choice.exchanges or ranks == 1 or choice.r < max(values["r"]):
            choice = dataclasses.replace(choice, spill="never")
        if not choice.exchanges or ranks == 1:
            choice = dataclasses.replace(choice, d=1, d_backward=0, send="rows",
                                         algorithm=values["algorithm"][0])
        elif choice.d_backward == choice.d:
            choice = dataclasses.replace(choice, d_backward=0)
        cut_by_experts = choice.piece_axis == "experts" and max(choice.d, choice.backward_d) > 1
        if cut_by_experts and "rows" not in values.get("piece_axis", ("rows",)):
            choice = dataclasses.replace(choice, send="rows")  # the cut is named
        if choice.d == choice.backward_d == 1 or (choice.send != "rows"
                                                  and choice.piece_axis == "experts"):
            choice = dataclasses.replace(choice, piece_axis="rows")
        made[choice] = None
    yield from made
