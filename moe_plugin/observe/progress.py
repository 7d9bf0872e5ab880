"""How far a run is: the line after its first step."""

from __future__ import annotations

from moe_plugin.planner.units import show_time


def first_step(seconds: float, tokens: float, left: int | None) -> str:
    """What the first step of a run says of the rest, for the log.

    Args:
        seconds: of the step.
        tokens: of all ranks in it.
        left: steps after it; None: not known.
    """
    text = f"first step: {show_time(seconds)}, {tokens / seconds:,.0f} tokens/s"
    if left is None:
        return text
    steps = "1 step" if left == 1 else f"{left:,} steps"
    return f"{text}; {steps} left, {show_time(left * seconds)} if all take as long"
