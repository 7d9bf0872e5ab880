"""Replicas of a run that can join and leave at any time. torchft manages the replicas.

This module checks the arguments. In Megatron's own training loop, this module also provides the
state that a run exchanges with other replicas.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from torch import nn

from moe_plugin.hosts.megatron.compat import optimizer as optimizers
from moe_plugin.hosts.megatron.compat.settings import script_arguments
from moe_plugin.hosts.megatron.file_arguments import Flag
from moe_plugin.hosts.megatron.refusals import REPLICAS, values_of
from moe_plugin.hosts.megatron.translate import settings_from_flags, timeout_of
from moe_plugin.training.resilience.elastic import ReplicaPlace, is_replica

FLAGS: tuple[Flag, ...] = (
    ("moe-lighthouse", {
        "help": "http://HOST:PORT of a torchft lighthouse, which makes this run one of several "
        "replicas that may join and leave (docs/replicas.md); default: no replicas"}),
    ("moe-replica", {"type": int, "default": 0,
                     "help": "number of this run among the replicas of --moe-lighthouse"}))


def check(args: argparse.Namespace) -> bool:
    """Return True if the run is one of several replicas.

    Raises:
        ValueError: If an argument cannot be used together with replicas.
    """
    return is_replica(args.moe_lighthouse, args.moe_replica, lambda: REPLICAS.refuse(
        values_of(args, settings_from_flags(vars(args)))))


def place_of(args: argparse.Namespace, models: Sequence[nn.Module], optimizer: Any,
             scheduler: Any, taken: dict[int, int]) -> ReplicaPlace | None:
    """Return an object that gives the replicas access to the state of this run, or None if the run
    has no replicas.

    Args:
        models: model chunks of the current rank, without their wrappers.
        optimizer: Megatron's outermost optimizer.
        scheduler: learning rate scheduler.
        taken: see `Script`. This function adds entries to the dict.
    """
    if not args.moe_lighthouse:
        return None
    given = script_arguments()

    def its_optimizers() -> list[Any]:
        # a rank without parameters of a kind has no optimizer for them
        inner = [part.optimizer for part in optimizers.parts(optimizer)]
        return [each for each in inner if each is not None]

    def done() -> int:
        return given.get("curr_iteration", given.get("iteration", 0))

    def progress() -> tuple[int, ...]:
        return taken.get(done(), done()), scheduler.num_steps

    def take(iteration: int, samples: int) -> None:
        # Megatron's loop continues after the current step: it skips the iterations between the
        # current and the received one, but reads their data
        current, scheduler.num_steps = done(), samples
        taken[current] = iteration
        given["iterations_to_skip"] = [*given["iterations_to_skip"],
                                       *range(current + 2, iteration + 2)]

    return ReplicaPlace(args.moe_lighthouse, args.moe_replica,
                        timeout_of(settings_from_flags(vars(args))), models, its_optimizers,
                        progress, take)
