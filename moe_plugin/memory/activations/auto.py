"""Policies of activations for a given memory, from what the first training steps measured.

The first steps measure: one swaps everything (bytes of each block, bandwidth of the tier), the
others compute everything again (seconds of each block), one that warms up and then as many as it
takes until two agree. All stay far below a limit that the plan can keep, and all compute the bits
of any other policy. Then the planner chooses (`moe_plugin.planner.offload.activation_plan`). Now
and then a step is measured again: one that is much faster says that the machine was busy then, and
all is measured again.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from statistics import median

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
    Order,
    Pass,
    no_probe,
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
from moe_plugin.utils.run_feature import StepFacts, refuse_unfit

logger = logging.getLogger(__name__)

MEASURING = ("swap", "recompute", "recompute")  # policies of all blocks in the first steps
MEASURING_AGAIN = 3  # steps without all blocks until that is said
MARGIN = 0.98  # of the memory that a step should have had, when it took more


def manage(blocks: Sequence[nn.Module], policy: str | Sequence[str] = "auto", *,
           memory: int | str | None = None, tier: Tier | None = None,
           folder: str | Path | None = None, throttle: float | None = None,
           smallest: int | str = SMALLEST, names: Sequence[str] | None = None,
           contexts: Sequence[Contexts] = (), comm: Comm | None = None,
           profile: str | Path | None = None) -> Activations:
    """Let the blocks of a model keep, recompute or swap what their backward passes need.

    Args:
        blocks: modules in the order of forward, each called once a micro-batch.
        policy: keep, recompute or swap for all blocks, one for each, or auto: chosen for `memory`.
        memory: bytes that activations of these blocks may take on the device, or a text such as
            8GiB; for auto.
        tier: where swapped activations go; None: host memory for a GPU's, files in `folder` for a
            CPU's.
        folder: on a disk; None: the folder for temporary files.
        throttle: bytes/s of the tier at most, for tests; None: as fast as it is.
        smallest: bytes of a storage that is worth a copy, or a text such as 64KiB.
        names: of the blocks; None: their numbers.
        contexts: further pairs of contexts for a recomputed pass, such as a host's own state of
            random numbers.
        comm: ranks that have the same blocks and must decide alike; for auto. Collective.
        profile: file for what auto has measured, read by `moe-plugin plan --memory`.

    Returns: the policies at work. Call its `after_step()` after each training step.
    Raises:
        ValueError: unknown policies, auto without memory, a folder that cannot be made.
    """
    names = [str(i) for i in range(len(blocks))] if names is None else list(names)
    limit = _size(memory) if isinstance(memory, str) else memory
    if policy == "auto" and not limit:
        raise ValueError(f"activations=auto with memory={short(memory)}: must be > 0, such as "
                         "8GiB, for the activations of these blocks on the device")
    if isinstance(policy, str) and policy not in ("auto", *POLICIES):
        raise ValueError(f"activations={short(policy)} is unknown; must be auto, "
                         f"{', '.join(POLICIES)}, or one of these for each block")
    device = next((p.device for block in blocks for p in block.parameters()), torch.device("cpu"))
    if tier is None:
        tier = tier_of(device, folder)
    smallest = _size(smallest) if isinstance(smallest, str) else smallest
    swapper = Swapper(tier, Copier(device, throttle), smallest)
    if policy == "auto":
        return AutoActivations(blocks, names, swapper, contexts, int(limit), comm, profile)
    policies = [policy] * len(blocks) if isinstance(policy, str) else policy
    return Activations(blocks, names, policies, swapper, contexts)


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise ValueError(f"size for activations: {error}") from error


def manage_layers(settings: OffloadConfig, layers: Mapping[str, nn.Module], comm: Comm, *,
                  places: Sequence[int] | None = None, total: int | None = None,
                  refused: Mapping[str, bool] | None = None,
                  contexts: Sequence[Contexts] = ()) -> Activations | None:
    """Let a model's layers treat their activations as the settings say; None: all are kept.

    Args:
        layers: in the order of forward, by name.
        comm: ranks that have the same layers.
        places: of these layers among the model's, from 0; None: these are all.
        total: the model's number of layers, with `places`.
        refused: settings of the host by name, and whether they are used: they do not fit.
        contexts: see `manage`.
    Raises:
        ValueError: settings do not fit each other or the host's.
    """
    if settings.activations == "keep":
        return None
    refuse_unfit(f"offload.activations={short(settings.activations)}", (
        (name, not used, "both decide about the same tensors or layers; leave one of them out")
        for name, used in (refused or {}).items()))
    if not layers:
        raise ValueError(f"offload.activations={short(settings.activations)}: this rank has no "
                         "transformer layer; use keep, or other pipeline stages")
    stashed = [name for name, layer in layers.items()
               if any(isinstance(config := getattr(m, "config", None), MoEConfig)
                      and config.dispatch.stash_mib > 0 for m in layer.modules())]
    if stashed:
        logger.warning(
            "dispatch.stash_mib is not used in %s and %d more layers where they recompute or swap: "
            "offload.activations decides what lies where", stashed[0], len(stashed) - 1)
    places = range(len(layers)) if places is None else places
    return manage(list(layers.values()), _policies(settings, places, total or len(layers)),
                  memory=settings.memory,
                  folder=settings.path, smallest=settings.smallest, names=list(layers),
                  contexts=contexts, comm=comm, profile=settings.profile)


def _policies(settings: OffloadConfig, places: Sequence[int], total: int) -> str | list[str]:
    """Those of the layers at `places` of `total`; one text: of all of them."""
    names = settings.each_layer()
    if len(names) == 1:
        return settings.activations
    if len(names) != total:
        raise ValueError(
            f"offload.activations={short(settings.activations)} has {len(names)} names, and the "
            f"model {total} layers: must be one for all, or one for each in the order of forward")
    if len(set(places)) < len(places) or max(places) >= total:
        raise ValueError(
            f"offload.activations={short(settings.activations)} names {total} layers, and the "
            "model has more, such as those for multi-token prediction: use one name for all, or "
            "auto")
    return [names[place] for place in places]


class AutoActivations(Activations):
    """Policies chosen for a limit of memory; see `manage` for the arguments.

    Attributes:
        limit: bytes.
        profile: what was measured; None: not yet.
        decision: the planner's; None: not yet, or no plan fits and all swap.
        planned: whether measuring is over.
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
        """See `Activations`; after the measuring steps it plans. Collective."""
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
                self._steps -= 1  # once more
            else:
                self._plan_first()  # all ranks have measured all blocks
        super().after_step(facts)

    def _check_times(self) -> None:
        """Now and then measures a step, and everything again where the plan's times came from a bad
        moment; collective after such a step.
        """
        if self.tell is not no_probe:
            self.tell = no_probe
            steady = self._measured.steady
            found = self._measured.forward_seconds()
            if self.comm.agree_max([float(steady.contradicts(found))])[0]:
                logger.info("activations: a step took much less than those that were measured, so "
                            "that they are measured again")
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
        """Measure, from the first step on."""
        self._steps, self.planned, self.decision = 0, False, None
        self.tell = self._measured = _Measured(self.swapper.copier.device)
        self.use([MEASURING[0]] * len(self.blocks))

    def _wait_for_blocks(self) -> None:
        """A step in which not all blocks ran is made again."""
        if not self._measured.complete(len(self.blocks)):
            self._measured.steady.steps.pop()
        self._steps -= 1
        self._waited += 1
        if self._waited == MEASURING_AGAIN:
            missing = [name for i, name in enumerate(self.names) if i not in self._measured.sizes]
            logger.warning(
                "activations: nothing is planned, because in %d steps %s; manage blocks that run "
                "in every step, and in no graph of torch.compile or checkpoint that is larger",
                self._waited, f"block {missing[0]} and {len(missing) - 1} more did not run"
                if missing else "another rank has not measured all blocks"
                if self._measured.complete(len(self.blocks)) else "no block had a backward pass")

    def _plan_first(self) -> None:
        self.tell = no_probe
        self.profile = self._agreed(self._measured.profile(self.names, self.swapper.copier))
        self.sizes = {i: BlockSizes(block.activation_bytes, block.kept_bytes)
                      for i, block in enumerate(self.profile.blocks)}
        if self._file is not None and self.comm.rank == 0:
            self.profile.save(self._file)
        self._in_flight = int(self.comm.agree_max([float(self.in_flight)])[0])
        try:
            self._plan()
        except ValueError as error:
            if self._in_flight == 1:
                raise
            logger.warning("activations: all blocks swap, because of %d micro-batches in flight "
                           "each has a share of %s, and %s", self._in_flight,
                           show_size(self.limit), error)
            self.use([SWAP] * len(self.blocks))
            self.decision, self.planned = None, True

    def _agreed(self, mine: ModelProfile) -> ModelProfile:
        """The slowest and largest of all ranks, so that they decide alike."""
        if self.comm.size == 1:
            return mine
        keys = ("forward_s", "backward_s", "activation_bytes", "kept_bytes")
        numbers = [float(getattr(block, key)) for block in mine.blocks for key in keys]
        *numbers, slowest = self.comm.agree_max([*numbers, -mine.in_bytes_s])
        blocks = [BlockProfile(name=name, forward_s=one[0], backward_s=one[1],
                               activation_bytes=int(one[2]), kept_bytes=int(one[3]))
                  for name, one in zip(self.names, zip(*[iter(numbers)] * len(keys)))]
        return ModelProfile(blocks=blocks, in_bytes_s=-slowest, out_bytes_s=-slowest, duplex=False)

    def _plan(self) -> None:
        limit = int(self.limit * self._margin) // self._in_flight
        self.planned = True
        self.decision = plan_activations(blocks_of(self.profile), limit,
                                         duplex=self.profile.duplex)
        self.use(self.decision.decisions, order_of(self.decision))
        counts = Counter(self.policies)
        logger.info(
            "activations of %d blocks: %s; predicted %.4g s a micro-batch and %s of %s, for %d "
            "micro-batches in flight", len(self.blocks),
            ", ".join(f"{counts[name]} {name}" for name in POLICIES), self.decision.seconds,
            show_size(self._in_flight * self.decision.outcome.peak), show_size(self.limit),
            self._in_flight)

    def _check_peak(self) -> None:
        """A step that took more than the limit is said, and planned again with a margin."""
        peak = int(self.comm.agree_max([float(self.ledger.peak)])[0])
        if peak <= self.limit:
            return
        self._margin *= MARGIN * self.limit / peak
        logger.warning(
            "activations took %s in a step, above the limit of %s: planned again for %s",
            show_size(peak), show_size(self.limit), show_size(int(self.limit * self._margin)))
        try:
            self._plan()
        except ValueError as error:
            logger.warning("no plan takes less: %s", error)


def order_of(plan: SwapPlan) -> Order:
    """When a plan's copies start, and what waits for them."""
    waits = plan.problem.waits(plan.decisions)
    fetches: dict[int, tuple[int, ...]] = {}
    for i in reversed(range(len(plan.decisions))):
        if plan.decisions[i] == SWAP:
            turn = waits.start[i]
            fetches[turn] = (*fetches.get(turn, ()), i)
    return Order(dict(enumerate(waits.forward)), dict(enumerate(waits.backward)), fetches)


class _Measured:
    """Seconds and bytes of each block, as a `Probe` that it is. `step`: the present one, from 0."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.step = device, 0
        self.sizes: dict[int, BlockSizes] = {}
        self.steady = Steady()
        self._begun: dict[tuple[str, int], float] = {}
        self._seconds: dict[str, dict[int, list[float]]] = {
            "forward": defaultdict(list), "backward": defaultdict(list)}

    def complete(self, blocks: int) -> bool:
        """Whether all blocks were measured; those that are frozen have no backward pass."""
        kinds = [kind for kind, _ in self.steady.best()]
        return len(self.sizes) == kinds.count("forward") == blocks and "backward" in kinds

    def __call__(self, what: str, begins: bool, one: Pass) -> None:
        wait_for_device(self.device)
        now = time.perf_counter()
        if begins:
            self._begun[what, one.number] = now
            return
        began = self._begun.pop((what, one.number), None)
        if what == "forward" and one.saved is not None:
            known = self.sizes.get(one.index)
            needed = max(one.saved.moved + one.saved.stayed, one.input_bytes)
            if known is None or needed > known.activations:
                self.sizes[one.index] = BlockSizes(needed, one.input_bytes)
        if began is not None and self.step >= len(MEASURING) - 1:
            self._seconds[what][one.index].append(now - began)

    def end_step(self) -> None:
        """After a step whose times count: of each block the median of its passes."""
        self.steady.add({(kind, i): median(times) for kind, by_block in self._seconds.items()
                         for i, times in by_block.items()})
        self.begin_check()

    def begin_check(self) -> None:
        """Before a step whose times alone are asked for."""
        self._seconds = {"forward": defaultdict(list), "backward": defaultdict(list)}

    def forward_seconds(self) -> dict[Hashable, float]:
        """Of each block in the step since `begin_check`."""
        return {("forward", i): median(times) for i, times in self._seconds["forward"].items()}

    def profile(self, names: Sequence[str], copier: Copier) -> ModelProfile:
        """What the steps measured; backward without the forward pass inside it."""
        speed = copier.counters.bytes / max(1e-9, copier.counters.busy_s)
        blocks, best = [], self.steady.best()
        for i, name in enumerate(names):
            forward, both = best["forward", i], best.get(("backward", i), 0.0)
            blocks.append(BlockProfile(
                name=name, forward_s=forward, backward_s=max(0.0, both - forward),
                activation_bytes=self.sizes[i].activations, kept_bytes=self.sizes[i].inputs))
        return ModelProfile(blocks=blocks, in_bytes_s=speed, out_bytes_s=speed, duplex=False)
