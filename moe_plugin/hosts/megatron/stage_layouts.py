"""Pipeline stages of unequal layout: `--stage-layouts tp=2 tp=1,ep=2`, one entry a stage.

Megatron has one set of sizes for all stages: its groups, and messages between ranks of equal index
in neighbouring stages. Here groups are made for every layout that occurs, and each rank keeps those
of its own stage's. Activations and their gradients go from the layout of one stage to that of the
next by `comm.resharding` (AlpaComm, arXiv 2211.05322), in the place of Megatron's own communicator
between stages. Every stage has the same number of ranks; with fewer tensor-parallel ones it has
more replicas, and each of them takes fewer samples of a micro-batch.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from megatron.core import parallel_state as ps
from torch import Tensor

from moe_plugin.comm import Comm
from moe_plugin.comm.host_collectives import comm_of
from moe_plugin.comm.resharding import Resharding
from moe_plugin.config import run_config
from moe_plugin.hosts.megatron.compat.names import (
    P2PCommunicator,
    ProcessGroupCollection,
    get_forward_backward_func,
)
from moe_plugin.hosts.megatron.compat.optimizer import (
    gradients_of_norm,
    norm_of_all_ranks,
    parts,
)
from moe_plugin.hosts.megatron.compat.settings import UNEQUAL_STAGES
from moe_plugin.hosts.megatron.translate import settings_from_flags
from moe_plugin.planner.resharding import TensorLayout

_FIELDS = {"tp": "tensor_model_parallel_size", "ep": "expert_model_parallel_size",
           "etp": "expert_tensor_parallel_size"}


@dataclass(frozen=True)
class StageLayout:
    """Sizes of one stage; etp None: Megatron's default, tp."""

    tp: int = 1
    ep: int = 1
    etp: int | None = None

    def __str__(self) -> str:
        return ",".join(f"{k}={v}" for k, v in asdict(self).items() if v is not None)


def parse(entries: Sequence[str]) -> list[StageLayout]:
    """Layouts by stage, of entries such as "tp=2,ep=4".

    Raises: ValueError: an entry that is not of this form.
    """
    return [_parse(entry) for entry in entries]


def _parse(entry: str) -> StageLayout:
    pairs = re.findall(r"(tp|ep|etp)=([1-9][0-9]{0,5})", entry)
    names = [name for name, _ in pairs]
    if ",".join(f"{name}={size}" for name, size in pairs) != entry or len(set(names)) < len(names):
        raise ValueError(f"stage_layouts={entry[:80]!r} is not a layout: must be sizes of tp, ep "
                         "and etp, each once at most, such as tp=2,ep=4; give one for each stage")
    return StageLayout(**{name: int(size) for name, size in pairs})


@dataclass(frozen=True)
class StageLayouts:
    """All stages.

    Attributes:
        layouts: by stage.
        ranks: of each.
        samples: of a micro-batch over all replicas of a stage.
        split: stages with tensor parallelism use sequence parallelism.
    """

    layouts: tuple[StageLayout, ...]
    ranks: int
    samples: int
    split: bool

    def replicas(self, stage: int) -> int:
        """Data-parallel ranks of a stage."""
        return self.ranks // self.layouts[stage].tp

    def stage_of(self, rank: int) -> int:
        """The stage of a rank of the world: stages are consecutive ranks."""
        return rank // self.ranks

    def arguments(self, args: argparse.Namespace, stage: int) -> argparse.Namespace:
        """What a stage is built from: `args` with its sizes."""
        layout, made = self.layouts[stage], copy.copy(args)
        made.tensor_model_parallel_size, made.expert_model_parallel_size = layout.tp, layout.ep
        made.expert_tensor_parallel_size = layout.etp
        made.sequence_parallel = self.split and layout.tp > 1
        made.micro_batch_size = self.samples // self.replicas(stage)
        if getattr(made, "eval_micro_batch_size", None) is not None:
            made.eval_micro_batch_size = made.micro_batch_size
        return made

    def activation(self, stage: int, length: int, width: int) -> TensorLayout:
        """A micro-batch [sequence, batch, width] at a stage's ranks, which count from 0."""
        tp = self.layouts[stage].tp
        mesh = {"data": self.replicas(stage), "tensor": tp}
        spec = [["tensor"] if self.split and tp > 1 else [], ["data"], []]
        return TensorLayout.on_mesh((length, self.samples, width), mesh, spec)


def stages_of(args: argparse.Namespace, world: int) -> StageLayouts | None:
    """The stages that `--stage-layouts` describes; None without it.

    `--micro-batch-size` is that of the stage with the most replicas.

    Raises: ValueError: layouts that do not fit the processes, or other arguments.
    """
    if not args.stage_layouts:
        return None
    layouts, count = parse(args.stage_layouts), args.pipeline_model_parallel_size
    for bad, name, value, bound, remedy in (
        (len(layouts) != count or count < 2, "stage_layouts", " ".join(args.stage_layouts),
         f"one layout for each of at least 2 stages, not for {count}",
         f"use --pipeline-model-parallel-size {max(2, len(layouts))}"),
        (world % count, "pipeline_model_parallel_size", count, f"a divisor of {world} processes",
         "start another number of processes"),
        *_unfit(args, layouts)):
        if bad:
            raise ValueError(f"{name}={value} with stages of unequal layout: must be {bound}; "
                             f"{remedy}")
    ranks = world // count
    for layout in layouts:
        if ranks % layout.tp:
            raise ValueError(f"stage_layouts={layout} needs a multiple of {layout.tp} ranks a stage"
                             f": there are {ranks}; use a divisor of {ranks}")
    most = max(ranks // layout.tp for layout in layouts)
    samples = args.micro_batch_size * most
    args.global_batch_size = args.global_batch_size or samples
    for layout in layouts:
        if samples % (ranks // layout.tp):
            raise ValueError(f"micro_batch_size={args.micro_batch_size} makes {samples} samples of "
                             f"{most} replicas: must be a multiple of the {ranks // layout.tp} "
                             f"replicas of a stage with {layout}; use another size")
    return StageLayouts(tuple(layouts), ranks, samples, args.sequence_parallel)


def _unfit(args: argparse.Namespace, layouts: Sequence[StageLayout]
           ) -> list[tuple[bool, str, Any, str, str]]:
    """What Megatron's model and optimizer code cannot have at stages of unequal layout."""
    given = (args.tensor_model_parallel_size, args.expert_model_parallel_size)
    schedule = run_config(settings_from_flags(vars(args))).pipeline.schedule
    virtual = [name for name in ("num_virtual_stages_per_pipeline_rank",
                                 "num_layers_per_virtual_pipeline_stage")
               if (getattr(args, name, None) or 1) > 1]
    return [
        (given != (1, 1) or args.expert_tensor_parallel_size is not None,
         "tensor_model_parallel_size, expert_model_parallel_size, expert_tensor_parallel_size",
         (*given, args.expert_tensor_parallel_size), "left out",
         "the layouts have them: tp, ep and etp"),
        (layouts[0].tp != layouts[-1].tp and not args.untie_embeddings_and_output_weights,
         "untie_embeddings_and_output_weights", False,
         "True where the first and the last stage have different tp",
         "use --untie-embeddings-and-output-weights: the two stages cut the vocabulary "
         "differently, and Megatron sums the gradients of tied weights rank by rank"),
        *((True, name, getattr(args, name), "1", "leave it out") for name in virtual),
        (args.context_parallel_size != 1, "context_parallel_size", args.context_parallel_size, "1",
         "leave it out"),
        *((bool(getattr(args, name, None)), name, getattr(args, name, None), "left out",
           "stages have different groups") for name in (
               "mtp_num_layers", "mtp_detach_heads", "use_tp_pp_dp_mapping",
               "hybrid_layer_pattern")),
        (bool(getattr(args, "pipeline_model_parallel_layout", None)),
         "pipeline_model_parallel_layout", getattr(args, "pipeline_model_parallel_layout", None),
         "left out", "use --decoder-first-pipeline-num-layers and --decoder-last-pipeline-"
         "num-layers for stages of other length"),
        (getattr(args, "eval_micro_batch_size", None) not in (None, args.micro_batch_size),
         "eval_micro_batch_size", getattr(args, "eval_micro_batch_size", None),
         f"micro_batch_size={args.micro_batch_size}", "leave it out"),
        (bool(getattr(args, "log_num_zeros_in_grad", None)) and not getattr(
            args, "use_distributed_optimizer", False), "log_num_zeros_in_grad", True,
         "left out without the distributed optimizer, whose ranks count over all stages",
         "leave it out, or use --use-distributed-optimizer"),
        (schedule != "1f1b", "pipeline.schedule", schedule, "1f1b", "leave it out"),
        (bool(getattr(args, "moe_lighthouse", None)), "moe_lighthouse",
         getattr(args, "moe_lighthouse", None), "left out",
         "its replicas of a rank are of one layout"),
    ]


def initialize(stages: StageLayouts, groups: Callable[..., None]) -> None:
    """Megatron's groups of every layout, of which this rank keeps those of its stage.

    Groups of ranks of equal index in their stages are those of the first layout everywhere. A
    collective call.

    groups: Megatron's `initialize_model_parallel`, which gets the sizes of layouts.
    """
    own = stages.stage_of(torch.distributed.get_rank())
    before, made = _state(ps), {}
    for layout in dict.fromkeys(stages.layouts):
        groups(**{field: getattr(layout, name) for name, field in _FIELDS.items()})
        made[layout] = _state(ps)
        _restore(ps, before)
    across = {name: value for name, value in made[stages.layouts[0]].items()
              if name.startswith(("_PIPELINE", "_EMBEDDING", "_POSITION_EMBEDDING"))}
    _restore(ps, made[stages.layouts[own]] | across)


def _state(module: Any) -> dict[str, Any]:
    """The module's variables; containers are copied, because Megatron adds to them."""
    return {name: copy.copy(value) if isinstance(value, (list, dict)) else value
            for name, value in vars(module).items()
            if re.fullmatch(r"_[A-Z_]+|_global_process_group_list", name)}


def _restore(module: Any, state: Mapping[str, Any]) -> None:
    for name, value in state.items():
        setattr(module, name, copy.copy(value) if isinstance(value, (list, dict)) else value)


@dataclass(frozen=True)
class _Boundary:
    """Between two stages: activations on, gradients back. scale: of the gradients."""

    forward: Resharding
    backward: Resharding
    scale: float


def boundaries(stages: StageLayouts, world: Comm,
               args: argparse.Namespace) -> list[_Boundary | None]:
    """By boundary; None where this rank is on neither side. A collective call of all ranks.

    A replica's gradients are those of its own mean loss, which Megatron averages over replicas:
    they grow by the ratio of replicas from stage to stage (not where the loss is a sum over tokens,
    `--calculate-per-token-loss`).
    """
    found: list[_Boundary | None] = []
    for stage in range(len(stages.layouts) - 1):
        sides = range(stage * stages.ranks, (stage + 2) * stages.ranks)
        # a group for each direction: on a GPU their messages do not wait for each other
        groups = [world.subgroup(sides), world.subgroup(sides)]
        if None in groups:
            found.append(None)
            continue
        first, second = (stages.activation(s, args.seq_length, args.hidden_size)
                         for s in (stage, stage + 1))
        second = TensorLayout(second.shape, {stages.ranks + device: box
                                             for device, box in second.boxes.items()})
        scale = stages.replicas(stage) / stages.replicas(stage + 1)
        found.append(_Boundary(Resharding(groups[0], first, second),
                               Resharding(groups[1], second, first),
                               1.0 if args.calculate_per_token_loss else scale))
    return found


def unequal_passes(stages: StageLayouts, args: argparse.Namespace, config: Any,
                   optimizer: Any) -> Callable[..., Any]:
    """Megatron's 1F1B with messages between stages of unequal layout; clips by the norm of all
    stages. A collective call.

    Args:
        config: Megatron's.
        optimizer: Megatron's; None: the model only evaluates.
    Raises: ValueError: this version of Megatron has no place for a communicator of others.
    """
    native = get_forward_backward_func()
    if "p2p_communicator" not in inspect.signature(native).parameters:
        raise ValueError(f"stage_layouts={' '.join(map(str, stages.layouts))} does not fit this "
                         "version of megatron-core, which takes no communicator between stages: "
                         f"use {UNEQUAL_STAGES}")
    world = comm_of(None, 60 * args.distributed_timeout_minutes)
    own, between = stages.stage_of(world.rank), boundaries(stages, world, args)

    class Unequal(P2PCommunicator):
        """Megatron's communicator, whose messages go by resharding."""

        def _communicate(self, *, tensor_send_next: Tensor | None, tensor_send_prev: Tensor | None,
                         recv_prev: bool, recv_next: bool, tensor_shape: Any,
                         wait_on_reqs: bool = True) -> tuple[Tensor | None, Tensor | None, None]:
            before = between[own - 1] if own else None
            after = between[own] if own < len(between) else None
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
            got = [ended.get(name) for name in ("got", "got back")]
            return (*(None if x is None else x.requires_grad_() for x in got), None)

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
        if not counted and config.finalize_model_grads_func is not None:  # loops set it late
            _count_tokens_of_all(config, own == len(between))
            counted = True
        return native(**{**given, "p2p_communicator": unequal, "pg_collection": groups})

    return run


def _agree_over_all_stages(optimizer: Any) -> None:
    """Let the gradient norm, which clips, and what a loss scaler looks for be those of all stages,
    where their groups differ.

    The groups over which Megatron sums the norm hold every parameter once if all stages are alike.
    Here each rank's part counts by how many such groups there are under its own stage's layout (one
    with the distributed optimizer).
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
    """Let gradients be divided by the tokens of all replicas of the last stage, where they are
    counted: Megatron sums what the last stage's ranks have over the replicas of each other stage.

    last: this rank is in the last stage.
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
