"""`LayoutChoice`, the description of a layer's parallel layout, which is used by the settings, the
planner and the tuner.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_plugin.planner.spill import POLICIES

DEGREES = (1, 2, 4, 8)  # overlap degrees that a search tries
SENDS = ("rows", "ranks", "nodes")


@dataclass(frozen=True, order=True, kw_only=True)
class LayoutChoice:
    """The parallel layout that one MoE layer uses in one step.

    Attributes:
        r: routing degree. With r = 0, there is no all-to-all: every rank gathers the parameters of
            all experts and processes its own tokens. Tutel calls this case data parallelism. With r
            >= 1, every row is sent to r of the ranks that share an expert, each of which gathers
            the missing parameters and computes 1/r of the expert's inner width. The case r = 1
            combines expert parallelism and data parallelism, and the case r > 1 combines expert
            parallelism and model parallelism. If there are at least as many experts as ranks, r
            must be 0 or 1.
        d: overlap degree in the forward pass. The rows are split into d pieces, and one piece is
            sent while another is computed. With d = 1, sending does not overlap with computing.
        d_backward: overlap degree in the backward pass. 0 means the same overlap degree as in the
            forward pass.
        algorithm: registered name of the all-to-all algorithm.
        kernel: registered name of the strategy that computes the experts.
        piece_axis: how rows are divided into pieces: by `rows`, by `experts` or by `peers`.
            `piece_axis` has no effect if there is only one piece.
        gather_tokens: if True, every rank gathers all tokens of the group and computes the rows of
            its own experts, without an all-to-all. The dispatcher `all_gather` also gathers all
            tokens in this way. Parameters are not gathered in this case.
        spill: a policy from `planner.spill.POLICIES`, which selects the ranks that compute rows of
            overloaded experts. Spilling requires the largest possible r, with which every row is
            sent to all slices of its expert.
        send: a value from `SENDS`: whether a token's row is sent once per selected expert, once per
            rank that stores selected experts, or once per node that stores selected experts.
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
        """True if the layout exchanges rows with an all-to-all."""
        return self.r > 0 and not self.gather_tokens

    def __post_init__(self) -> None:
        for name, bound in (("r", 0), ("d", 1), ("d_backward", 0)):
            if getattr(self, name) < bound:
                raise ValueError(
                    f"layout {name}={getattr(self, name)} is too small; it must be >= {bound}. "
                    "See docs/adaptive.md"
                )
        if self.spill not in POLICIES:
            raise ValueError(f"layout spill={self.spill!r} is unknown. Choose from "
                             f"{', '.join(POLICIES)}; see docs/overload.md")
        if self.send not in SENDS:
            raise ValueError(f"layout send={self.send!r} is unknown. Choose from "
                             f"{', '.join(SENDS)}; see docs/once.md")

    @property
    def backward_d(self) -> int:
        """Overlap degree (number of pieces) in the backward pass."""
        return self.d_backward or self.d

    @property
    def words(self) -> str:
        """Description of the layout in words, for logs and reports."""
        if self.gather_tokens:
            parts = ["tokens gathered on all ranks, no all-to-all"]
        elif not self.r:
            parts = ["experts' weights gathered, no all-to-all"]
        else:
            copies = f", each to {self.r} ranks" * (self.r > 1)
            once = "" if self.send == "rows" else f", once to each {self.send[:-1]}"
            parts = [f"tokens sent by all-to-all {self.algorithm}{copies}{once}"]
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
        """Short form of the layout for files and statistics, such as `r=1 d=2 2dh auto`.

        Fields other than r, d, algorithm and kernel are included only if they differ from their
        defaults.
        """
        back = f"/{self.d_backward}" if self.d_backward and self.d_backward != self.d else ""
        more = (f" {f.name}={getattr(self, f.name)}" for f in dataclasses.fields(self)[5:]
                if getattr(self, f.name) != f.default)
        return f"r={self.r} d={self.d}{back} {self.algorithm} {self.kernel}" + "".join(more)

    def __str__(self) -> str:
        return self.label

    def as_dict(self) -> dict[str, Any]:
        """Return the fields of the layout as a dictionary of plain values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_label(cls, text: str) -> LayoutChoice:
        """Return the layout for a string that was created by `label`.

        Raises:
            ValueError: If the string is not a layout label.
        """
        try:
            r, pieces, algorithm, kernel, *more = text.split(" ")
            d, _, back = pieces.removeprefix("d=").partition("/")
            named = dict(pair.split("=") for pair in more)
            gather = named.pop("gather_tokens", "False") == "True"
            return cls(r=int(r.removeprefix("r=")), d=int(d), d_backward=int(back or 0),
                       algorithm=algorithm, kernel=kernel, gather_tokens=gather, **named)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{text[:80]!r} is not a layout label. Layout labels look like "
                             "'r=1 d=2 linear auto'") from error

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LayoutChoice:
        """Return the layout with the given fields, which have the same form as in the result of
        `as_dict`.
        """
        return cls(**values)


def divisors(n: int) -> list[int]:
    """Return all divisors of n in ascending order."""
    small = [i for i in range(1, math.isqrt(n) + 1) if n % i == 0]
    return sorted({*small, *(n // i for i in small)})


def legal_r(experts: int, ranks: int, shards: int | None = None) -> list[int]:
    """Return all possible values of r: 0 and every divisor of S.

    On a single rank, the only possible value is 1.

    Args:
        shards: number S of ranks that share an expert. Defaults to `ranks / experts`, but at least
            1.

    Raises:
        ValueError: If `experts` is not a divisor or a multiple of `ranks`.
    """
    if ranks == 1:
        return [1]
    if shards is None and experts % ranks and ranks % experts:
        raise ValueError(
            f"num_experts={experts} does not fit {ranks} expert-parallel ranks. Use a multiple "
            f"or a divisor of {ranks} experts"
        )
    shards = shards or max(1, ranks // experts)
    return [0, *divisors(shards)]


def legal_choices(experts: int, ranks: int, *, degrees: Iterable[int] = DEGREES,
                  algorithms: Iterable[str] = ("linear",), kernels: Iterable[str] = ("auto",),
                  backward_degrees: Iterable[int] = (0,), sends: Iterable[str] = ("rows",)
                  ) -> Iterator[LayoutChoice]:
    """Yield every useful layout for `ranks` ranks that can be built from the given values of each
    field.
    """
    values = {
        "kernel": kernels, "r": legal_r(experts, ranks), "algorithm": algorithms,
        "d": degrees, "d_backward": backward_degrees, "send": sends
    }
    yield from combinations({name: list(v) for name, v in values.items()}, ranks)


def combinations(values: Mapping[str, Sequence[Any]], ranks: int) -> Iterator[LayoutChoice]:
    """Yield every useful layout that can be built from `values`, a mapping from field names to
    lists of values.


    Layouts without an all-to-all (r = 0, gathered tokens, or a single rank) have no exchange that
    could overlap with computation. These layouts therefore use d = 1 and the first algorithm, and
    never spill rows. Layouts that gather tokens, and layouts that spill rows, use the largest
    possible r. Layouts that send each token once per rank or once per node cannot use the piece
    axis `experts`.
    """
    choices: dict[LayoutChoice, None] = {}
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
            # the caller fixed the axis, so the way of sending must follow
            choice = dataclasses.replace(choice, send="rows")
        if choice.d == choice.backward_d == 1 or (choice.send != "rows"
                                                  and choice.piece_axis == "experts"):
            choice = dataclasses.replace(choice, piece_axis="rows")
        choices[choice] = None
    yield from choices
