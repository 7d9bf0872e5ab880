"""Automatic choice of an activation policy for each block, given a memory limit. The choice is
based on measurements during training.

In the first step, all blocks are swapped. The first step measures the activation bytes of each
block and the bandwidth of the tier. In the next steps, all blocks are recomputed. The first step
with recomputation is a warm-up. The following steps measure the time of each block, until the times
of two steps agree. The measuring steps need much less memory than the smallest limit for which a
plan exists. The outputs and gradients of the measuring steps are bitwise equal to those with any
other policy. Finally, the planner (`moe_plugin.planner.offload.activation_plan`) chooses a policy
for each block. Afterwards, a step is measured at intervals. If it is much faster than before, the
machine was busy during the first measurements, so all measurements are repeated.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from moe_plugin.comm import Comm, LocalComm
from moe_plugin.comm.agreement import agree
from moe_plugin.config import MoEConfig, OffloadConfig
from moe_plugin.memory.activations.offload import (
    POLICIES,
    Activations,
    BlockSizes,
    Contexts,
    Pass,
    no_probe,
    order_of,
)
from moe_plugin.memory.activations.swap import SMALLEST, Swapper
from moe_plugin.memory.copier import Copier
from moe_plugin.memory.tiers import Tier, tier_of
from moe_plugin.planner.offload.activation_plan import SwapPlan
from moe_plugin.planner.offload.activation_plan import plan as plan_activations
from moe_plugin.planner.offload.activation_problem import SWAP, blocks_of
from moe_plugin.planner.offload.schedule import BlockProfile, ModelProfile
from moe_plugin.planner.trials import Checks, Steady
from moe_plugin.planner.units import parse_size, show_size
from moe_plugin.utils.machine import wait_for_device
from moe_plugin.utils.messages import short
from moe_plugin.utils.run_feature import StepFacts

logger = logging.getLogger(__name__)

MEASURING = ("swap", "recompute", "recompute")  # policies of all blocks in the first steps
MEASURING_AGAIN = 3  # after this many steps in which some blocks did not run, a warning is logged
MARGIN = 0.98  # after a step above the limit, its memory is planned with this additional factor


def manage(blocks: Sequence[nn.Module], policy: str | Sequence[str] = "auto", *,
           memory: int | str | None = None, tier: Tier | None = None,
           folder: str | Path | None = None, throttle: float | None = None,
           smallest: int | str = SMALLEST, names: Sequence[str] | None = None,
           contexts: Sequence[Contexts] = (), comm: Comm | None = None,
           profile: str | Path | None = None) -> Activations:
    """For each block of a model, determine whether its activations are kept, recomputed or swapped.

    Args:
        blocks: modules in forward order. Each module must be called exactly once per micro-batch.
        policy: "keep", "recompute" or "swap" for all blocks, a list with one policy per block, or
            "auto". With "auto", the policies are chosen so that the activations fit in `memory`.
        memory: number of bytes that the activations of these blocks may use on the device, or a
            string such as "8GiB". Required if `policy` is "auto".
        tier: tier for swapped activations. Defaults to host memory if the blocks are on a GPU, and
            to files in `folder` if they are on a CPU.
        folder: folder on disk for swapped activations. Defaults to the system's folder for
            temporary files.
        throttle: maximum bandwidth of the tier in bytes per second. Intended for tests. By default,
            the bandwidth is not limited.
        smallest: smallest size of a storage to swap, in bytes or as a string such as "64KiB".
        names: names of the blocks. Defaults to the indices of the blocks.
        contexts: functions that create additional contexts for recomputation, for example to
            restore the random state of a host framework.
        comm: group of ranks that have the same blocks. With "auto", all ranks of the group must
            call this function.
        profile: output file for the measurements of "auto". Read by `moe-plugin plan --memory`.

    Returns: The object that applies the policies. Call `after_step()` of the returned object after
    each training step.
    Raises:
        ValueError: If a policy is unknown, `memory` is missing, or the folder cannot be created.
    """
    names = [str(i) for i in range(len(blocks))] if names is None else list(names)
    limit = _size(memory) if isinstance(memory, str) else memory
    if policy == "auto" and not limit:
        raise ValueError(f"activations=auto needs a memory limit, but memory={short(memory)}: set "
                         "memory to the device memory for the activations of these blocks, for "
                         "example 8GiB")
    if isinstance(policy, str) and policy not in ("auto", *POLICIES):
        raise ValueError(f"activations={short(policy)} is unknown; use auto, "
                         f"{', '.join(POLICIES)}, or a list of policies for the blocks")
    device = next((p.device for block in blocks for p in block.parameters()), torch.device("cpu"))
    if tier is None:
        tier = tier_of(device, folder)
    smallest = _size(smallest) if isinstance(smallest, str) else smallest
    swapper = Swapper(tier, Copier(device, throttle), smallest)
    if policy == "auto" and limit is not None:
        return AutoActivations(blocks, names, swapper, contexts, int(limit), comm, profile)
    policies = [policy] * len(blocks) if isinstance(policy, str) else policy
    return Activations(blocks, names, policies, swapper, contexts)


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise ValueError(f"invalid size for activations: {error}") from error


def manage_layers(settings: OffloadConfig, layers: Mapping[str, nn.Module], comm: Comm, *,
                  places: Sequence[int] | None = None, total: int | None = None,
                  contexts: Sequence[Contexts] = ()) -> Activations | None:
    """Apply the activation settings to the layers of a model. The function returns None if all
    activations are kept.

    Args:
        settings: the settings.
        layers: mapping from the name of each layer to the layer, in the order of the forward pass.
        comm: group of ranks that have the same layers.
        places: indices of the given layers among all layers of the model, counted from 0. Defaults
            to the indices of all layers of the model.
        total: total number of layers in the model. Required if `places` is given.
        contexts: see `manage`.
    Raises:
        ValueError: If the settings contradict each other.
    """
    if settings.activations == "keep":
        return None
    if not layers:
        raise ValueError(f"offload.activations={short(settings.activations)} does not work on this "
                         "rank, which has no transformer layer; use keep, or repartition the model")
    stashed = [name for name, layer in layers.items()
               if any(isinstance(config := getattr(m, "config", None), MoEConfig)
                      and config.dispatch.stash_mib > 0 for m in layer.modules())]
    if stashed:
        logger.warning(
            "dispatch.stash_mib is ignored in %s and %d more layers if they recompute or swap, "
            "because offload.activations controls their activations", stashed[0], len(stashed) - 1)
    places = range(len(layers)) if places is None else places
    return manage(list(layers.values()), _policies(settings, places, total or len(layers)),
                  memory=settings.memory,
                  folder=settings.path, smallest=settings.smallest, names=list(layers),
                  contexts=contexts, comm=comm, profile=settings.profile)


def _policies(settings: OffloadConfig, places: Sequence[int], total: int) -> str | list[str]:
    """Return the policies of the layers with indices `places`, or a single policy for all layers.
    """
    names = settings.each_layer()
    if len(names) == 1:
        return settings.activations
    if len(names) != total:
        raise ValueError(
            f"offload.activations={short(settings.activations)} has {len(names)} policies, but the "
            f"model has {total} layers: use one policy for all layers, or one for each layer in "
            "the order of the forward pass")
    if len(set(places)) < len(places) or max(places) >= total:
        raise ValueError(
            f"offload.activations={short(settings.activations)} has policies for {total} layers, "
            "but the model has more layers, such as those for multi-token prediction: use one "
            "policy for all layers, or auto")
    return [names[place] for place in places]


class AutoActivations(Activations):
    """Activation policies that are chosen automatically for a memory limit. See `manage` for the
    arguments of the constructor.

    Attributes:
        limit: memory limit for activations, in bytes.
        profile: measurements of all blocks, or None before the measurements are complete.
        decision: the planner's decision, or None before planning or if no plan fits in the limit.
        planned: True if all measurements are complete.
    """

    def __init__(self, blocks: Sequence[nn.Module], names: Sequence[str], swapper: Swapper,
                 contexts: Sequence[Contexts], limit: int, comm: Comm | None,
                 profile: str | Path | None) -> None:
        self.limit, self.comm, self._file = limit, LocalComm() if comm is None else comm, profile
        self.profile: ModelProfile | None = None
        self.decision: SwapPlan | None = None
        self.planned = False
        self._steps, self._margin, self._in_flight, self._waited = 0, 1.0, 1, 0
        self._checks = Checks()
        agree(self.comm, {"blocks whose activations are managed": tuple(names),
                          "their memory": limit})
        super().__init__(blocks, names, [MEASURING[0]] * len(blocks), swapper, contexts)
        self.tell = self._measured = _Measured(swapper.copier.device)

    def after_step(self, facts: StepFacts | None = None) -> None:
        """See `Activations`. Also chooses the policies after the last measured step. Collective."""
        self._steps += 1
        if self.planned:
            if self.decision is not None:
                self._check_peak()
            self._check_times()
        elif self._steps < len(MEASURING):
            self._measured.step = self._steps
            self.use([MEASURING[self._steps]] * len(self.blocks))
        else:
            self._measured.end_step()
            blocks, steady = len(self.blocks), self._measured.steady
            missing, few = self.comm.agree_max([float(not self._measured.complete(blocks)),
                                                float(not steady.enough)])
            if missing:
                self._wait_for_blocks()
            elif few:
                self._steps -= 1  # repeats the step
            else:
                self._plan_first()  # all ranks have measured all blocks
        super().after_step(facts)

    def _check_times(self) -> None:
        """At intervals, measure a step again, and restart all measurements if the old times were
        too long. The first call after a measured step is collective.
        """
        if self.tell is not no_probe:
            self.tell = no_probe
            steady = self._measured.steady
            times = self._measured.forward_seconds()
            if self.comm.agree_max([float(steady.contradicts(times))])[0]:
                logger.info("activations: a step took much less time than the measured steps, so "
                            "the measurements are repeated")
                self._measure_again()
                self._checks.changed()
            else:
                self._checks.agreed()
            return
        self._checks.calls += 1
        if self._checks.due():
            self._measured.begin_check()
            self.tell = self._measured

    def _measure_again(self) -> None:
        """Restart all measurements from the first step."""
        self._steps, self.planned, self.decision = 0, False, None
        self.tell = self._measured = _Measured(self.swapper.copier.device)
        self.use([MEASURING[0]] * len(self.blocks))

    def _wait_for_blocks(self) -> None:
        """Repeat a measured step in which some blocks did not run."""
        if not self._measured.complete(len(self.blocks)):
            self._measured.steady.steps.pop()
        self._steps -= 1
        self._waited += 1
        if self._waited == MEASURING_AGAIN:
            missing = [name for i, name in enumerate(self.names) if i not in self._measured.sizes]
            logger.warning(
                "activations: policies are not planned, because in %d steps %s; manage blocks that "
                "run in every step, outside of larger graphs of torch.compile or checkpoint",
                self._waited, f"block {missing[0]} and {len(missing) - 1} more did not run"
                if missing else "another rank has not measured all blocks"
                if self._measured.complete(len(self.blocks)) else "no block had a backward pass")

    def _plan_first(self) -> None:
        self.tell = no_probe
        measured = self._measured.profile(self.names, self.swapper.copier)
        self.profile = profile = self._agreed(measured)
        self.sizes = {i: BlockSizes(block.activation_bytes, block.kept_bytes)
                      for i, block in enumerate(profile.blocks)}
        if self._file is not None and self.comm.rank == 0:
            profile.save(self._file)
        self._in_flight = int(self.comm.agree_max([float(self.in_flight)])[0])
        try:
            self._plan()
        except ValueError as error:
            if self._in_flight == 1:
                raise
            logger.warning("activations: all blocks swap, because each of %d micro-batches in "
                           "flight has a share of %s, and %s", self._in_flight,
                           show_size(self.limit), error)
            self.use([SWAP] * len(self.blocks))
            self.decision, self.planned = None, True

    def _agreed(self, profile: ModelProfile) -> ModelProfile:
        """Combine the measurements of all ranks: use the longest times, the largest sizes and the
        lowest bandwidth. As a result, all ranks choose the same policies.
        """
        if self.comm.size == 1:
            return profile
        keys = ("forward_s", "backward_s", "activation_bytes", "kept_bytes")
        numbers = [float(getattr(block, key)) for block in profile.blocks for key in keys]
        # negated, because the slowest bandwidth is a minimum and ranks agree on maxima
        *numbers, slowest = self.comm.agree_max([*numbers, -profile.in_bytes_s])
        blocks = [BlockProfile(name=name, forward_s=values[0], backward_s=values[1],
                               activation_bytes=int(values[2]), kept_bytes=int(values[3]))
                  for name, values in zip(self.names, zip(*[iter(numbers)] * len(keys)))]
        return ModelProfile(blocks=blocks, in_bytes_s=-slowest, out_bytes_s=-slowest, duplex=False)

    def _plan(self) -> None:
        # each micro-batch in flight has its own activations
        limit = int(self.limit * self._margin) // self._in_flight
        assert self.profile is not None  # since `_plan_first`
        self.planned = True
        self.decision = plan_activations(blocks_of(self.profile), limit,
                                         duplex=self.profile.duplex)
        self.use(self.decision.decisions, order_of(self.decision))
        counts = Counter(self.policies)
        logger.info(
            "activations of %d blocks: %s; predicted %.4g s per micro-batch and %s of %s, for %d "
            "micro-batches in flight", len(self.blocks),
            ", ".join(f"{counts[name]} {name}" for name in POLICIES), self.decision.seconds,
            show_size(self._in_flight * self.decision.outcome.peak), show_size(self.limit),
            self._in_flight)

    def _check_peak(self) -> None:
        """If a step exceeded the memory limit, log the excess and plan again with a safety margin.
        """
        peak = int(self.comm.agree_max([float(self.ledger.peak)])[0])
        if peak <= self.limit:
            return
        self._margin *= MARGIN * self.limit / peak
        logger.warning(
            "activations used %s in a step, above the limit of %s; planning again for %s",
            show_size(peak), show_size(self.limit), show_size(int(self.limit * self._margin)))
        try:
            self._plan()
        except ValueError as error:
            logger.warning("no plan needs less memory: %s", error)


class _Measured:
    """A `Probe` that measures the time and bytes of each block in the step with index `step`."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.step = device, 0
        self.sizes: dict[int, BlockSizes] = {}
        self.steady = Steady()
        self._begun: dict[tuple[str, int], float] = {}
        self._seconds: dict[str, dict[int, list[float]]] = {
            "forward": defaultdict(list), "backward": defaultdict(list)}

    def complete(self, blocks: int) -> bool:
        """Return whether all blocks have been measured. Frozen blocks have no backward pass."""
        measured: Any = self.steady.best()  # by direction and block
        kinds = [direction for direction, _ in measured]
        return len(self.sizes) == kinds.count("forward") == blocks and "backward" in kinds

    def __call__(self, what: str, begins: bool, block_pass: Pass) -> None:
        # a GPU computes asynchronously, so its work must end before the time is read
        wait_for_device(self.device)
        now = time.perf_counter()
        if begins:
            self._begun[what, block_pass.number] = now
            return
        began = self._begun.pop((what, block_pass.number), None)
        if what == "forward" and block_pass.saved is not None:
            known = self.sizes.get(block_pass.index)
            needed = max(block_pass.saved.moved + block_pass.saved.stayed, block_pass.input_bytes)
            if known is None or needed > known.activations:
                self.sizes[block_pass.index] = BlockSizes(needed, block_pass.input_bytes)
        if began is not None and self.step >= len(MEASURING) - 1:
            self._seconds[what][block_pass.index].append(now - began)

    def end_step(self) -> None:
        """Finish a step, and record the median time of each block over its passes in the step."""
        self.steady.add({(kind, i): median(times) for kind, by_block in self._seconds.items()
                         for i, times in by_block.items()})
        self.begin_check()

    def begin_check(self) -> None:
        """Prepare for a step that measures only times."""
        self._seconds = {"forward": defaultdict(list), "backward": defaultdict(list)}

    def forward_seconds(self) -> dict[Hashable, float]:
        """Return the forward time of each block in seconds since `begin_check` was called."""
        return {("forward", i): median(times) for i, times in self._seconds["forward"].items()}

    def profile(self, names: Sequence[str], copier: Copier) -> ModelProfile:
        """Return the profile of the measured steps. Backward times exclude recomputation."""
        speed = copier.counters.bytes / max(1e-9, copier.counters.busy_s)
        blocks, best = [], self.steady.best()
        for i, name in enumerate(names):
            forward, both = best["forward", i], best.get(("backward", i), 0.0)
            blocks.append(BlockProfile(
                name=name, forward_s=forward, backward_s=max(0.0, both - forward),
                activation_bytes=self.sizes[i].activations, kept_bytes=self.sizes[i].inputs))
        return ModelProfile(blocks=blocks, in_bytes_s=speed, out_bytes_s=speed, duplex=False)
