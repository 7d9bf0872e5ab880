"""Pipeline stages with different parallel layouts, which the user sets with
`--stage-layouts tp=2 tp=1,ep=2`.

Megatron uses the same parallel sizes for all stages. Megatron creates one set of process groups.
Each rank exchanges messages with the ranks that have the same index in the neighbouring stages.
This module creates process groups for every layout, and each rank uses the groups of its own stage.
Activations and their gradients are converted between the layouts of neighbouring stages by
`comm.resharding` (AlpaComm, arXiv 2211.05322), which replaces Megatron's communicator between
stages. All stages have the same number of ranks. A stage with a smaller tensor-parallel size has
more replicas, so each replica processes fewer samples of a micro-batch.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from megatron.core import parallel_state as ps
from torch import Tensor

from moe_plugin.comm import Comm
from moe_plugin.comm.host_collectives import comm_of
from moe_plugin.comm.resharding import Resharding
from moe_plugin.hosts.megatron.compat.names import (
    P2PCommunicator,
    ProcessGroupCollection,
    get_forward_backward_func,
)
from moe_plugin.hosts.megatron.compat.optimizer import gradients_of_norm, norm_of_all_ranks, parts
from moe_plugin.hosts.megatron.compat.regrouping import group_state, restore_groups
from moe_plugin.hosts.megatron.compat.settings import UNEQUAL_STAGES
from moe_plugin.hosts.megatron.refusals import STAGE_LAYOUTS, values_of
from moe_plugin.hosts.megatron.translate import settings_from_flags
from moe_plugin.planner.resharding import TensorLayout

_FIELDS = {"tp": "tensor_model_parallel_size", "ep": "expert_model_parallel_size",
           "etp": "expert_tensor_parallel_size"}


@dataclass(frozen=True)
class StageLayout:
    """The parallel sizes of one pipeline stage.

    Attributes:
        tp: tensor-parallel size.
        ep: expert-parallel size.
        etp: expert-tensor-parallel size. By default, `etp` equals `tp`, as in Megatron.
    """

    tp: int = 1
    ep: int = 1
    etp: int | None = None

    def __str__(self) -> str:
        return ",".join(f"{k}={v}" for k, v in asdict(self).items() if v is not None)


def parse(entries: Sequence[str]) -> list[StageLayout]:
    """Parse entries such as "tp=2,ep=4", and return one layout per stage.

    Raises:
        ValueError: If an entry is not a list of sizes such as "tp=2,ep=4".
    """
    return [_parse(entry) for entry in entries]


def _parse(entry: str) -> StageLayout:
    pairs = re.findall(r"(tp|ep|etp)=([1-9][0-9]{0,5})", entry)
    names = [name for name, _ in pairs]
    if ",".join(f"{name}={size}" for name, size in pairs) != entry or len(set(names)) < len(names):
        raise ValueError(f"stage_layouts={entry[:80]!r} is not a layout. A layout contains the "
                         "sizes tp, ep and etp, each at most once, such as tp=2,ep=4. Pass one "
                         "layout per stage.")
    return StageLayout(**{name: int(size) for name, size in pairs})


@dataclass(frozen=True)
class StageLayouts:
    """The parallel layouts of all pipeline stages.

    Attributes:
        layouts: tuple with one layout per stage.
        ranks: number of ranks per stage.
        samples: number of samples in a micro-batch, summed over all replicas of a stage.
        split: True if sequence parallelism is used in stages that have tensor parallelism.
    """

    layouts: tuple[StageLayout, ...]
    ranks: int
    samples: int
    split: bool

    def replicas(self, stage: int) -> int:
        """Return the number of data-parallel ranks of a stage."""
        return self.ranks // self.layouts[stage].tp

    def stage_of(self, rank: int) -> int:
        """Return the stage of a global rank. Each stage consists of consecutive ranks."""
        return rank // self.ranks

    def arguments(self, args: argparse.Namespace, stage: int) -> argparse.Namespace:
        """Return a copy of `args` with the parallel sizes of one stage."""
        layout, made = self.layouts[stage], copy.copy(args)
        made.tensor_model_parallel_size, made.expert_model_parallel_size = layout.tp, layout.ep
        made.expert_tensor_parallel_size = layout.etp
        made.sequence_parallel = self.split and layout.tp > 1
        made.micro_batch_size = self.samples // self.replicas(stage)
        if getattr(made, "eval_micro_batch_size", None) is not None:
            made.eval_micro_batch_size = made.micro_batch_size
        return made

    def activation(self, stage: int, length: int, width: int) -> TensorLayout:
        """Return how a micro-batch tensor [sequence, batch, width] is distributed over the ranks of
        a stage. The ranks are numbered from 0.
        """
        tp = self.layouts[stage].tp
        mesh = {"data": self.replicas(stage), "tensor": tp}
        spec = [["tensor"] if self.split and tp > 1 else [], ["data"], []]
        return TensorLayout.on_mesh((length, self.samples, width), mesh, spec)


def stages_of(args: argparse.Namespace, world: int) -> StageLayouts | None:
    """Return the stages that `--stage-layouts` describes, or None if this argument is not set.

    `--micro-batch-size` is the micro-batch size of the stage that has the most replicas.

    Raises:
        ValueError: If the layouts are not possible with this number of processes, or cannot be
            combined with another argument.
    """
    if not args.stage_layouts:
        return None
    layouts, count = parse(args.stage_layouts), args.pipeline_model_parallel_size
    STAGE_LAYOUTS.refuse(values_of(
        args, settings_from_flags(vars(args)), words=" ".join(args.stage_layouts), world=world,
        layouts=len(layouts), most=max(2, len(layouts)), first_tp=layouts[0].tp,
        last_tp=layouts[-1].tp))
    ranks = world // count
    for layout in layouts:
        if ranks % layout.tp:
            raise ValueError(f"stage_layouts={layout} needs a multiple of {layout.tp} ranks per "
                             f"stage, but each stage has {ranks} ranks. Use a tp that divides "
                             f"{ranks}.")
    most = max(ranks // layout.tp for layout in layouts)
    samples = args.micro_batch_size * most
    args.global_batch_size = args.global_batch_size or samples
    for layout in layouts:
        if samples % (ranks // layout.tp):
            raise ValueError(f"micro_batch_size={args.micro_batch_size} on {most} replicas gives "
                             f"{samples} samples. This number must be a multiple of the "
                             f"{ranks // layout.tp} replicas of the stage with layout {layout}. "
                             "Use another micro-batch size.")
    return StageLayouts(tuple(layouts), ranks, samples, args.sequence_parallel)


def initialize(stages: StageLayouts, groups: Callable[..., None]) -> None:
    """Create process groups for every layout, and select the groups of the current rank's stage.

    Process groups that span several stages are always those of the first layout. Groups that span
    several stages connect the ranks that have the same index in each stage. This is a collective
    operation, so all ranks must call this function.

    groups: Megatron's `initialize_model_parallel`. `groups` is called once for each layout, with
    the parallel sizes of the layout.
    """
    stage = stages.stage_of(torch.distributed.get_rank())
    before, made = group_state(), {}
    for layout in dict.fromkeys(stages.layouts):
        groups(**{field: getattr(layout, name) for name, field in _FIELDS.items()})
        made[layout] = group_state()
        restore_groups(before)
    across = {name: value for name, value in made[stages.layouts[0]].items()
              if name.startswith(("_PIPELINE", "_EMBEDDING", "_POSITION_EMBEDDING"))}
    restore_groups(made[stages.layouts[stage]] | across)


@dataclass(frozen=True)
class _Boundary:
    """The exchange of activations and gradients between two neighbouring stages.

    Attributes:
        forward: resharding of the activations that are sent to the next stage.
        backward: resharding of the gradients that are sent to the previous stage.
        scale: factor by which the gradients are multiplied before they are sent.
    """

    forward: Resharding
    backward: Resharding
    scale: float


def boundaries(stages: StageLayouts, world: Comm,
               args: argparse.Namespace) -> list[_Boundary | None]:
    """Return a list with one boundary for each pair of neighbouring stages. The element is None if
    the current rank belongs to neither stage.

    The gradients on a replica are those of the replica's mean loss, and Megatron averages gradients
    over replicas. To correct for this, the gradients are multiplied by the ratio of the replica
    counts of the two stages. With `--calculate-per-token-loss` the gradients are not multiplied,
    because the loss is a sum over tokens. This is a collective operation, so all ranks must call
    this function.
    """
    between: list[_Boundary | None] = []
    for stage in range(len(stages.layouts) - 1):
        sides = range(stage * stages.ranks, (stage + 2) * stages.ranks)
        # one group per direction, so that on a GPU their messages do not wait for each other
        there, back = world.subgroup(sides), world.subgroup(sides)
        if there is None or back is None:
            between.append(None)
            continue
        first, second = (stages.activation(s, args.seq_length, args.hidden_size)
                         for s in (stage, stage + 1))
        second = TensorLayout(second.shape, {stages.ranks + device: box
                                             for device, box in second.boxes.items()})
        scale = stages.replicas(stage) / stages.replicas(stage + 1)
        between.append(_Boundary(Resharding(there, first, second),
                                 Resharding(back, second, first),
                                 1.0 if args.calculate_per_token_loss else scale))
    return between


def unequal_passes(stages: StageLayouts, args: argparse.Namespace, config: Any,
                   optimizer: Any) -> Callable[..., Any]:
    """Return Megatron's 1F1B schedule for stages with different parallel layouts.

    The schedule clips gradients by their norm over all stages. This is a collective operation.

    Args:
        config: Megatron's `TransformerConfig`.
        optimizer: Megatron's optimizer, or None if the model is only evaluated.
    Raises:
        ValueError: If the installed Megatron does not accept a replacement for its communicator
            between stages.
    """
    native = get_forward_backward_func()
    if "p2p_communicator" not in inspect.signature(native).parameters:
        raise ValueError(f"stage_layouts={' '.join(map(str, stages.layouts))} does not work with "
                         "this version of megatron-core, which does not accept a communicator "
                         f"between stages. Use megatron-core {UNEQUAL_STAGES}.")
    world = comm_of(None, 60 * args.distributed_timeout_minutes)
    stage, between = stages.stage_of(world.rank), boundaries(stages, world, args)

    class Unequal(P2PCommunicator):
        """A subclass of Megatron's communicator that reshards all messages."""

        def _communicate(self, *, tensor_send_next: Tensor | None, tensor_send_prev: Tensor | None,
                         recv_prev: bool, recv_next: bool, tensor_shape: Any,
                         wait_on_reqs: bool = True) -> tuple[Tensor | None, Tensor | None, None]:
            # None where this stage has no neighbour, with which it then exchanges nothing
            before: Any = between[stage - 1] if stage else None
            after: Any = between[stage] if stage < len(between) else None
            dtype = self.config.pipeline_dtype
            moves = {}
            if tensor_send_next is not None:
                moves["sent on"] = after.forward.start(tensor_send_next, dtype)
            if tensor_send_prev is not None:
                moves["sent back"] = before.backward.start(tensor_send_prev * before.scale, dtype)
            if recv_prev:
                moves["got"] = before.forward.start(None, dtype)
            if recv_next:
                moves["got back"] = after.backward.start(None, dtype)
            ended = {name: move.end() for name, move in moves.items()}
            got, got_back = (None if x is None else x.requires_grad_() for x in (
                ended.get("got"), ended.get("got back")))
            return got, got_back, None

    groups = ProcessGroupCollection()
    groups.tp, groups.pp = (ps.get_tensor_model_parallel_group(),
                            ps.get_pipeline_model_parallel_group())
    groups.cp = ps.get_context_parallel_group()
    groups.embd = ps.get_embedding_group(check_initialized=False)
    groups.pos_embd = ps.get_position_embedding_group(check_initialized=False)
    groups.dp_cp = ps.get_data_parallel_group(with_context_parallel=True)
    unequal = Unequal(groups.pp, config)
    if optimizer is not None:
        _agree_over_all_stages(optimizer)
    counted = not args.calculate_per_token_loss

    def run(**given: Any) -> Any:
        nonlocal counted
        # training loops set this function after `unequal_passes` has returned
        if not counted and config.finalize_model_grads_func is not None:
            _count_tokens_of_all(config, stage == len(between))
            counted = True
        return native(**{**given, "p2p_communicator": unequal, "pg_collection": groups})

    return run


def _agree_over_all_stages(optimizer: Any) -> None:
    """Make gradient clipping and the loss scaler take the gradients of all stages into account.

    If all stages have the same layout, each of Megatron's process groups for the gradient norm
    contains every parameter exactly once. With different layouts, the sum over all ranks would
    count parameters several times. Therefore, the contribution of each rank is multiplied by the
    size of its process group for the gradient norm, and divided by the number of all ranks.
    """
    world, chain = comm_of(), parts(optimizer)
    shares = [torch.distributed.get_world_size(part.get_grad_stats_parallel_group()) / world.size
              for part in chain]

    @torch.no_grad()
    def norm() -> float:
        total = torch.zeros((), dtype=torch.float32, device=world.device)
        for part, share in zip(chain, shares, strict=True):
            for grad in gradients_of_norm(part):
                total += share * grad.float().square().sum()
        return math.sqrt(world.all_reduce(total).item())

    norm_of_all_ranks(optimizer, norm)


def _count_tokens_of_all(config: Any, last: bool) -> None:
    """Divide the gradients by the number of tokens on all replicas of the last stage.

    This function is used if the loss is a sum over tokens. Megatron itself would sum the token
    counts of the last stage's ranks over the replicas of each stage. This sum would be wrong for a
    stage whose number of replicas differs from that of the last stage.

    last: True if the current rank belongs to the last stage.
    """
    world, finish = comm_of(), config.finalize_model_grads_func
    counts = last and ps.get_tensor_model_parallel_rank() == 0

    def finalize(model: list[Any], num_tokens: Tensor | None = None, **further: Any) -> None:
        finish(model, None, **further)
        if num_tokens is None:
            return
        total = world.all_reduce(num_tokens if counts else torch.zeros_like(num_tokens)).item()
        for chunk in model if total else ():
            chunk.scale_gradients(1.0 / total)

    config.finalize_model_grads_func = finalize
