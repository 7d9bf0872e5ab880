"""Replicas of a run that come and go, by torchft: what their arguments must be, and what a run of
Megatron's own loop tells of itself.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from torch import nn

from moe_plugin.hosts.megatron.compat import optimizer as optimizers
from moe_plugin.hosts.megatron.compat.settings import script_arguments
from moe_plugin.hosts.megatron.file_arguments import Flag
from moe_plugin.hosts.megatron.translate import settings_from_flags, timeout_of
from moe_plugin.training.resilience.elastic import ReplicaPlace, is_replica

FLAGS: tuple[Flag, ...] = (
    ("moe-lighthouse", {
        "help": "http://HOST:PORT of a torchft lighthouse: this run is one replica of several that "
        "come and go (docs/replicas.md); default: it is the only one"}),
    ("moe-replica", {"type": int, "default": 0,
                     "help": "number of this run among the replicas of --moe-lighthouse"}))


def check(args: argparse.Namespace) -> bool:
    """Whether the run is one replica of several. `ValueError`: it cannot be."""
    # peers average weights, in float32
    halves = not settings_from_flags(vars(args)).get("offload.average_every") and (
        getattr(args, "fp16", False) or getattr(args, "bf16", False))
    return is_replica(args.moe_lighthouse, args.moe_replica, lambda: [
        ("--fp16, --bf16 and --use-distributed-optimizer",
         not (halves or args.use_distributed_optimizer),
         "leave these three out: replicas average float32 gradients of whole parameters"),
        ("--moe-router-enable-expert-bias", not args.moe_router_enable_expert_bias,
         "its biases follow each replica's own loads; use --moe-router sigmoid_bias")])


def place_of(args: argparse.Namespace, models: Sequence[nn.Module], optimizer: Any,
             scheduler: Any, taken: dict[int, int]) -> ReplicaPlace | None:
    """The place of a run among its replicas; None: it is the only one.

    Args:
        models: of this rank, without wrappers. optimizer: Megatron's outermost one. scheduler: of
            its learning rate. taken: see `Script`; it is written.
    """
    if not args.moe_lighthouse:
        return None
    given = script_arguments()

    def its_optimizers() -> list[Any]:
        # a rank without parameters of a kind has no optimizer for them
        found = [part.optimizer for part in optimizers.parts(optimizer)]
        return [each for each in found if each is not None]

    def done() -> int:
        return given.get("curr_iteration", given.get("iteration", 0))

    def progress() -> tuple[int, ...]:
        return taken.get(done(), done()), scheduler.num_steps

    def take(iteration: int, samples: int) -> None:
        # Megatron's loop goes on after the present step: it reads the data of those between
        mine, scheduler.num_steps = done(), samples
        taken[mine] = iteration
        given["iterations_to_skip"] = [*given["iterations_to_skip"],
                                       *range(mine + 2, iteration + 2)]

    return ReplicaPlace(args.moe_lighthouse, args.moe_replica,
                        timeout_of(settings_from_flags(vars(args))), models, its_optimizers,
                        progress, take)
