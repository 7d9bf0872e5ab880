"""Ranks of the expert group that hold the same tokens (tensor parallelism without sequence
parallelism), and Parm's S1.

S1 pauses tensor parallelism before the gate: each of N ranks takes 1/N of the tokens, routes and
sends them like anybody else, and the outputs are gathered. Every parameter outside the experts then
sees a part of the tokens, so its gradient is summed over the N.
"""

from __future__ import annotations

import dataclasses
import logging

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_plugin.comm.base import Comm
from moe_plugin.comm.regions import gather, split, sum_parts
from moe_plugin.config import MoEConfig
from moe_plugin.dispatch import dispatchers
from moe_plugin.experts.marks import is_expert
from moe_plugin.planner.parm import ParmShape, choose_schedule
from moe_plugin.records import Placement
from moe_plugin.tuning.default_hardware import default_cluster

log = logging.getLogger(__name__)


REFERENCE_TOKENS = 4096  # of a rank, for the choice of a schedule before any token is seen


def with_replicas(config: MoEConfig,
                  place: Placement) -> tuple[MoEConfig, Placement, Replicas | None]:
    """The settings as they are, or, with `parallel.replicas` > 1, those of the schedule that was
    chosen and the ranks that share tokens.

    Raises: ValueError: ranks, dispatcher and schedule do not fit together.
    """
    rules = config.parallel
    if rules.replicas == 1 or getattr(dispatchers.get(config.dispatch.name), "same_tokens", False):
        return config, place, None
    schedule = _schedule(config, place)
    replicas = Replicas(place.comm, rules.replicas)
    if schedule == "s1":
        return config, place, replicas
    config = dataclasses.replace(config, dispatch=dataclasses.replace(config.dispatch,
                                                                      name="parm_s2"))
    return config, dataclasses.replace(place, replicas=replicas.comm), None


def _schedule(config: MoEConfig, place: Placement) -> str:
    asked, dispatch = config.parallel.schedule, config.dispatch
    slots = dispatch.capacity_factor is not None and dispatch.name in ("padded", "parm_s2")
    if asked == "s2" and not slots:
        raise ValueError(
            f"parallel.schedule='s2' shares slots, dispatch.name={dispatch.name!r} with "
            f"capacity_factor={dispatch.capacity_factor} has none; "
            "use dispatch.name='padded' with a capacity factor, or schedule 's1'")
    if asked != "auto" or not slots:
        return "s2" if asked == "s2" or dispatch.name == "parm_s2" else "s1"
    shape = ParmShape(tokens=REFERENCE_TOKENS, model_dim=config.model_dim,
                      rows_factor=config.router.top_k * (abs(dispatch.capacity_factor) or 1.0),
                      replicas=config.parallel.replicas, shards=place.shards)
    chosen = choose_schedule(shape, default_cluster(place.comm, place.comm.device))
    log.info("schedule of %d ranks with the same tokens: %s", config.parallel.replicas, chosen)
    return chosen


class Replicas:
    """`size` consecutive ranks of `comm` that hold the same tokens.

    Its methods are S1's; S2 uses only `comm`.
    """

    def __init__(self, comm: Comm, size: int) -> None:
        if comm.size % size:
            raise ValueError(
                f"parallel.replicas={size} does not fit {comm.size} expert-parallel ranks: must be "
                "a divisor; the nearest is "
                f"{max(d for d in range(1, size + 1) if comm.size % d == 0)}")
        self.comm = comm.run_of(size)

    def adopt(self, layer: nn.Module) -> None:
        """S1: gradients of parameters outside the experts are summed over the ranks. Call once,
        when the parameters are made.
        """
        for parameter in layer.parameters():
            if not is_expert(parameter):
                parameter.register_hook(lambda grad: self.comm.all_reduce(grad.contiguous()))

    def part(self, x_TD: Tensor, mask_T: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """This rank's tokens and mask; padded with masked tokens to a multiple of the ranks."""
        missing = -x_TD.shape[0] % self.comm.size
        if missing:
            real_T = x_TD.new_ones(x_TD.shape[0], dtype=torch.bool) if mask_T is None else mask_T
            x_TD, mask_T = F.pad(x_TD, (0, 0, 0, missing)), F.pad(real_T, (0, missing))
        mask_T = None if mask_T is None else mask_T.chunk(self.comm.size)[self.comm.rank]
        return split(x_TD, self.comm), mask_T

    def whole(self, y_TD: Tensor, tokens: int,
              losses: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Everybody's outputs, and the losses as sums of the parts; both equal on all ranks."""
        return gather(y_TD, self.comm)[:tokens], {
            name: sum_parts(part, self.comm) for name, part in losses.items()
        }
