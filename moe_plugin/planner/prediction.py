"""What a plan predicts of a training step, as the file that a run compares itself with
(`observe.prediction`).

A step has three parts, which are predicted and can be measured alike: *products* (all that a rank
computes), *exchange* (what it waits for other ranks; what overlaps with products does not count)
and *optimizer* (clipping and update).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from moe_plugin.messages import cut, short
from moe_plugin.regular_files import check_input

PARTS = ("products", "exchange", "optimizer")
FILE = "prediction.json"
REMEDY = "write it again with `moe-plugin plan --write` or `moe-plugin recommend`"
MAX_SECONDS, MAX_BYTES, MAX_SKEW = 1e9, 1e18, 1e12


class Interval(NamedTuple):
    """Seconds, with the bounds between which they are expected."""

    low: float
    middle: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A plan's step.

    Attributes:
        task: model, tokens and ranks: what plans that can be compared have in common.
        plan: its label.
        machine: of the constants it was made with.
        basis: how the interval was made.
        parts: low, middle and high seconds by `PARTS`; those left out were not predicted.
        memory_bytes: of the fullest rank.
        skew: rows of the busiest rank over the mean, as assumed.
    """

    task: str = ""
    plan: str = ""
    machine: str = ""
    basis: str = ""
    parts: dict[str, list[float]] = field(default_factory=dict)
    memory_bytes: float = 0.0
    skew: float = 1.0

    def __post_init__(self) -> None:
        if not self.parts or not set(self.parts) <= set(PARTS):
            raise ValueError(f"parts {', '.join(self.parts) or 'none'} must be some of "
                             f"{', '.join(PARTS)}; {REMEDY}")
        for name, part in self.parts.items():
            if len(part) != 3 or not 0 <= part[0] <= part[1] <= part[2] <= MAX_SECONDS:
                raise ValueError(f"{name}={short(part)} must be low, middle and high seconds from "
                                 f"0 to {MAX_SECONDS:g}; {REMEDY}")
        if not 0 <= self.memory_bytes <= MAX_BYTES:
            raise ValueError(f"memory_bytes={self.memory_bytes} must be from 0 to {MAX_BYTES:g}; "
                             f"{REMEDY}")
        if not 1 <= self.skew <= MAX_SKEW:
            raise ValueError(f"skew={self.skew} must be from 1 to {MAX_SKEW:g}; {REMEDY}")

    @property
    def seconds(self) -> Interval:
        """Of a step; the errors of its parts are added up as if they came together."""
        return Interval(*map(sum, zip(*self.parts.values(), strict=True)))


def dump_prediction(prediction: Prediction) -> str:
    """The text of its file."""
    return json.dumps(asdict(prediction), indent=1) + "\n"


def load_prediction(path: str | Path) -> Prediction:
    """Read such a file; `ValueError` where it does not hold one."""
    try:
        check_input(Path(path))
        return prediction_of(json.loads(Path(path).read_text(encoding="utf-8")))
    except OSError as error:
        raise ValueError(f"prediction {short(str(path))} cannot be read ({error.strerror}); "
                         f"{REMEDY}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"prediction {short(str(path))}: {cut(str(error), 300)}") from error


def prediction_of(values: Any) -> Prediction:
    """Of plain values; `ValueError`: they are none."""
    try:
        given = dict(values)
        parts = {str(name): [float(one) for one in part]
                 for name, part in dict(given.pop("parts")).items()}
        memory, skew = float(given.pop("memory_bytes", 0.0)), float(given.pop("skew", 1.0))
        words = {str(name): str(text) for name, text in given.items()}
        return Prediction(parts=parts, memory_bytes=memory, skew=skew, **words)
    except (TypeError, KeyError, OverflowError) as error:
        raise ValueError(f"no prediction ({error}); {REMEDY}") from error


def measured_parts(seconds: float, optimizer: float, exchange: float) -> Mapping[str, float]:
    """A measured step by `PARTS`: what is neither exchange nor optimizer is products."""
    return {"products": max(0.0, seconds - optimizer - exchange), "exchange": exchange,
            "optimizer": optimizer}
