"""Routers as FSDP2 units of their own."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from moe_plugin.layer import layers_in


def shard_routers(model: nn.Module, ignored_params: set[nn.Parameter],
                  mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
                  **options: Any) -> None:
    """Make each router whose parameters are of another dtype than the rest a unit of its own.

    FSDP2 refuses parameters of several dtypes in one unit. Under `router.fp32` the router is such a
    unit, too, where `mp_policy` lowers the model: it computes with its parameters as they are. A
    router's few parameters stay gathered between forward and backward. Call it before the units
    around the routers are made.

    Args:
        ignored_params: of the experts.
        mp_policy, options: of `torch.distributed.fsdp.fully_shard`.
    """
    layers = layers_in(model)
    inside = {p for layer in layers for p in layer.router.parameters()}
    rest = {p.dtype for p in model.parameters() if p not in ignored_params and p not in inside}
    options["reshard_after_forward"] = False
    for layer in layers:
        dtypes, fp32 = {p.dtype for p in layer.router.parameters()}, layer.config.router.fp32
        if dtypes and (fp32 or dtypes != rest):
            policy = dataclasses.replace(mp_policy, param_dtype=None) if fp32 else mp_policy
            fully_shard(layer.router, ignored_params=ignored_params, mp_policy=policy, **options)
