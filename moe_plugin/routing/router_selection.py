"""Which router of a list decides a call, by name. A rule sees only what all ranks share, so that
all of them take the same one.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from moe_plugin.config.router import SelectionConfig
from moe_plugin.registry import Registry


@dataclass(frozen=True)
class SelectionCall:
    """What a rule may look at.

    count: routers in the list. step: optimizer steps that are over. layer: number of this MoE layer
    in its model, from 0; None: nobody said (`moe_plugin.routing.number_layers`). training: of the
    layer. settings: `router.selection`.
    """

    count: int
    step: int
    layer: int | None
    training: bool
    settings: SelectionConfig

    @property
    def turn(self) -> int:
        """Number of the present run of `every` steps."""
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
            "layer in its model; call "
            "moe_plugin.routing.number_layers(model) once (fairseq and Megatron-core do so)")
    return call.layer % call.count


@router_selections.register("cycle")
def cycle(call: SelectionCall) -> int:
    """Each in its turn, `every` optimizer steps long; outside training number `outside_training`.
    """
    return call.turn % call.count if call.training else call.settings.outside_training


@router_selections.register("random")
def drawn(call: SelectionCall) -> int:
    """A uniform draw every `every` optimizer steps, from seed, step and layer alone; outside
    training number `outside_training`.
    """
    if not call.training:
        return call.settings.outside_training
    # seeded by text, which Python hashes alike on every machine and in every version since 3.2
    return random.Random(f"{call.settings.seed} {call.turn} {call.layer or 0}").randrange(
        call.count)
