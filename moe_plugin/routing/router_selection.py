"""Rules that select one of several routers for a call, by name.

A rule reads only what all ranks share, so all of them select the same router.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from moe_plugin.config.router import SelectionConfig
from moe_plugin.registry import Registry


@dataclass(frozen=True)
class SelectionCall:
    """What a rule may read.

    Attributes:
        count: number of routers.
        step: completed optimizer steps.
        layer: number of this MoE layer in its model, from 0; None: unknown.
        training: of the layer.
        settings: `router.selection`.
    """

    count: int
    step: int
    layer: int | None
    training: bool
    settings: SelectionConfig

    @property
    def period(self) -> int:
        """Number of the current period of `every` steps, from 0."""
        return self.step // self.settings.every


SelectionRule = Callable[[SelectionCall], int]
router_selections: Registry[SelectionRule] = Registry("router_selection")


@router_selections.register("first")
def first(call: SelectionCall) -> int:
    """Always the first of the list."""
    return 0


@router_selections.register("layer")
def layer(call: SelectionCall) -> int:
    """MoE layer n takes router n mod count, in training and outside."""
    if call.layer is None:
        raise ValueError(
            "layer=None does not fit router.selection.rule=layer: must be the number of this MoE "
            "layer in its model; build the layer with HostContext(layer_number=...), or call "
            "moe_plugin.routing.number_layers(model) once")
    return call.layer % call.count


@router_selections.register("cycle")
def cycle(call: SelectionCall) -> int:
    """One after the other, each for `every` optimizer steps.

    Outside training: number `outside_training`.
    """
    return call.period % call.count if call.training else call.settings.outside_training


@router_selections.register("random")
def drawn(call: SelectionCall) -> int:
    """A uniform draw every `every` optimizer steps, from seed, step and layer only.

    Outside training: number `outside_training`.
    """
    if not call.training:
        return call.settings.outside_training
    # seeded by text, which Python hashes alike on every machine and in every version since 3.2
    return random.Random(f"{call.settings.seed} {call.period} {call.layer or 0}").randrange(
        call.count)
