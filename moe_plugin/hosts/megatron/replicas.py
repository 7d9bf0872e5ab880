"""Replicas of a run that come and go, by torchft: what their arguments must be, and the feature of
a run that averages their gradients.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from moe_plugin.hosts.megatron.compat import optimizer as optimizers
from moe_plugin.hosts.megatron.own_flags import Flag
from moe_plugin.hosts.megatron.translate import settings_from_flags, timeout_of
from moe_plugin.messages import short
from moe_plugin.resilience.elastic import ReplicaSteps, check_alone, check_settings

FLAGS: tuple[Flag, ...] = (
    ("moe-lighthouse", {
        "help": "http://HOST:PORT of a torchft lighthouse: this run is one replica of several that "
        "come and go (docs/replicas.md); default: it is the only one"}),
    ("moe-replica", {"type": int, "default": 0,
                     "help": "number of this run among the replicas of --moe-lighthouse"}))


def check(args: argparse.Namespace) -> None:
    """`ValueError` for arguments that replicas cannot have, and for a replica without others."""
    if not args.moe_lighthouse:
        check_alone(args.moe_replica)
        return
    for name, good, bound, remedy in (
            ("moe_lighthouse", not (args.fp16 or args.bf16 or args.use_distributed_optimizer),
             "left out with --fp16, --bf16 and --use-distributed-optimizer",
             "leave these three out: replicas average float32 gradients of whole parameters"),
            ("moe_router_enable_expert_bias", not args.moe_router_enable_expert_bias,
             "off with --moe-lighthouse, where Megatron's biases follow each replica's own loads",
             "use --moe-router sigmoid_bias")):
        if not good:
            raise ValueError(f"{name}={short(getattr(args, name))} is out of bounds: must be "
                             f"{bound}; {remedy}")
    check_settings(args.moe_replica)


def replicas_of(args: argparse.Namespace, models: Sequence[nn.Module], optimizer: Any,
                progress: Callable[[], tuple[int, ...]],
                take: Callable[..., None]) -> ReplicaSteps | None:
    """The replicas of a run; None: it is the only one.

    Args:
        models: of this rank, without wrappers. optimizer: Megatron's outermost one.
        progress: of this run, steps done first. take: another run's, in its place.
    """
    if not args.moe_lighthouse:
        return None

    def its_optimizers() -> list[Any]:
        # a rank without parameters of a kind has no optimizer for them
        found = [part.optimizer for part in optimizers.parts(optimizer)]
        return [each for each in found if each is not None]

    def state() -> dict[str, Any]:
        return {"optimizers": [each.state_dict() for each in its_optimizers()],
                "progress": progress()}

    def load(given: dict[str, Any]) -> None:
        for mine, its_state in zip(its_optimizers(), given["optimizers"], strict=True):
            mine.load_state_dict(its_state)
        take(*given["progress"])

    return ReplicaSteps(args.moe_lighthouse, args.moe_replica,
                        timeout_of(settings_from_flags(vars(args))), models, state, load,
                        lambda: progress()[0])
