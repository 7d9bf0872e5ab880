"""Which router of a list decides a call, by name. A rule sees only what all ranks share, so that
all of them take the same one.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from moe_plugin.config.router import GateChoiceConfig
from moe_plugin.registry import Registry


@dataclass(frozen=True)
class GateCall:
    """What a rule may look at.

    count: routers in the list. step: optimizer steps that are over. layer: number of this MoE layer
    in its model, from 0; None: nobody said (`moe_plugin.routing.number_layers`). training: of the
    layer. settings: `router.choice`.
    """

    count: int
    step: int
    layer: int | None
    training: bool
    settings: GateChoiceConfig

    @property
    def turn(self) -> int:
        """Number of the present run of `every` steps."""
        return self.step // self.settings.every


GateRule = Callable[[GateCall], int]
gate_choices: Registry[GateRule] = Registry("gate_choice")


@gate_choices.register("first")
def first(call: GateCall) -> int:
    """Always the first of the list."""
    return 0


@gate_choices.register("layer")
def layer(call: GateCall) -> int:
    """MoE layer n takes router n mod count, in training and outside."""
    if call.layer is None:
        raise ValueError(
            "layer=None does not fit router.choice.rule=layer: must be the number of this MoE "
            "layer in its model; call "
            "moe_plugin.routing.number_layers(model) once (fairseq and Megatron-core do so)")
    return call.layer % call.count


@gate_choices.register("cycle")
def cycle(call: GateCall) -> int:
    """Each in its turn, `every` optimizer steps long; outside training number `outside_training`.
    """
    return call.turn % call.count if call.training else call.settings.outside_training


@gate_choices.register("random")
def drawn(call: GateCall) -> int:
    """A uniform draw every `every` optimizer steps, from seed, step and layer alone; outside
    training number `outside_training`.
    """
    if not call.training:
        return call.settings.outside_training
    # seeded by text, which Python hashes alike on every machine and in every version since 3.2
    return random.Random(f"{call.settings.seed} {call.turn} {call.layer or 0}").randrange(
        call.count)
