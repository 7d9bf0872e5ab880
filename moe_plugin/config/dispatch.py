"""Settings of the dispatcher and of capacity."""

from __future__ import annotations

from dataclasses import dataclass

from moe_plugin.config.options import Section, option


@dataclass(kw_only=True)
class DispatchConfig(Section):
    """How tokens become expert rows, and how many rows an expert takes."""

    PATH = "dispatch."

    name: str = option(
        "ragged", "dispatcher: ragged (exact rows) or padded (fixed slots), by registered name",
        flag="dispatch")
    capacity_factor: float | None = option(
        None,
        "none: dropless. f > 0: k*int(f*ceil(T/E)) slots per expert and source rank; 0: the "
        "largest load (never drops); f < 0: the largest load, at most k*int(-f*ceil(T/E))",
        flag="capacity-factor")
    eval_capacity_factor: float | None = option(
        None, "capacity factor outside training; none: the training one",
        flag="eval-capacity-factor")
    eval_token_fraction: float = option(
        0.0, "> 0: outside training, capacity is ceil(fraction * T) for any capacity factor",
        flag="eval-token-fraction")
    equal_tokens: bool = option(
        False,
        "promise that every rank always has the same number of tokens: saves one small all-reduce "
        "per layer and counts padding as tokens in the capacity",
        flag="equal-tokens")

    def check_bounds(self) -> None:
        """Check factors and the fraction."""
        for name in ("capacity_factor", "eval_capacity_factor"):
            self.within(name, -1e6, 1e6, "use none for no capacity")
        self.require("eval_token_fraction", 0 <= self.eval_token_fraction <= 1, "in [0, 1]",
                     "use 0 to take the capacity factor")
