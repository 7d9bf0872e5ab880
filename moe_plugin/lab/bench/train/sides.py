"""What the sides of both hosts share: the settings of ours, and what their tuners do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from moe_plugin.layer import MoELayer
from moe_plugin.planner.choice import LayoutChoice
from moe_plugin.tuning.exchange_tuner import ExchangeTuner
from moe_plugin.tuning.layout_selector import LayoutSelector

Settings = Mapping[str, Any]  # of the layer by path; and `FUSED_ADAM`
FUSED_ADAM = "--moe-fused-adam"
OURS, AUTO = "moe-plugin", "moe-plugin, auto"
_ONE_LAYOUT = {"parallel.mode": "fixed"}
# what `auto` chooses from, each alone
FIXED: dict[str, Settings] = {
    "linear": {**_ONE_LAYOUT, "comm.all_to_all": "linear"},
    "native": {**_ONE_LAYOUT, "comm.all_to_all": "native"},
    "2dh": {**_ONE_LAYOUT, "comm.all_to_all": "2dh"},
    "leader": {**_ONE_LAYOUT, "comm.all_to_all": "leader"},
    "r=0": {**_ONE_LAYOUT, "parallel.r": 0, "comm.all_to_all": "linear"},
    "all_gather": {"dispatch.name": "all_gather", "comm.all_to_all": "linear"},
}
PIECES = "moe-plugin, pieces by load"
ONE_NODE = ("linear", "native", "r=0", "all_gather")


def our_settings(several_nodes: bool) -> dict[str, Settings]:
    """The sides of our layer by name: defaults; `auto` for everything on one node, and every fixed
    setting that is not the default.
    """
    if several_nodes:  # there the defaults are auto
        return {OURS: {}, **{f"{OURS}, {name}": FIXED[name] for name in FIXED}}
    auto = {"parallel.mode": "auto", "comm.all_to_all": "auto"}
    return {OURS: {}, AUTO: auto, **{f"{OURS}, {name}": FIXED[name] for name in ONE_NODE}}


def evaluated_settings(hardware: Settings) -> dict[str, Settings]:
    """The sides of our layer in evaluation: without and with pieces by load, both with what is
    known of links and processors.
    """
    return {OURS: hardware, PIECES: {**hardware, "parallel.prefill": True}}


def tuners_settled(layers: Sequence[MoELayer]) -> Callable[[], bool]:
    """A function that says whether these layers' tuners have no trials left; alike on all ranks."""
    return lambda: not any(_exploring(layer) for layer in layers)


def _exploring(layer: MoELayer) -> bool:
    layouts = layer.layouts
    if layouts.tuner is not None and layouts.tuner.exploring:
        return True
    exchanges = layer.comm.size > 1 and layouts.current.r > 0
    return exchanges and layouts.current.algorithm == "auto" and ExchangeTuner.of(
        layer.comm).exploring


def take_choices(layer: MoELayer, choose: Callable[[Tensor], Tensor]) -> None:
    """From now on `choose` gives the experts [T, K] of logits [T, E]."""
    layer.router.forced = lambda call: choose(call.logits_TE)


def layout_of(layers: Sequence[MoELayer], tokens: int) -> str:
    """The layouts of the latest calls, and how many layers run in each. Collective.

    tokens: of a rank in a step.
    """
    seen = Counter(_latest(layer.layouts, tokens).label for layer in layers)
    return ", ".join(label if count == len(layers) else f"{label} ({count} of {len(layers)})"
                     for label, count in seen.items())


def _latest(layouts: LayoutSelector, tokens: int) -> LayoutChoice:
    if layouts.prefill is None:
        return layouts.current
    return layouts.prefill.choice(layouts.current, tokens)
