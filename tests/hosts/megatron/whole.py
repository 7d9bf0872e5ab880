"""Whole GPT models in one step of Megatron's schedules: what every rank has of each gradient, and
these put together.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.hosts.megatron.layers import Case

VOCABULARY, LENGTH, BATCH, BATCHES = 32, 16, 2, 4


@dataclass
class Whole(Case):
    """A model of four layers. pp, vpp: pipeline stages, and virtual ones of each. ddp: settings of
    Megatron's data-parallel wrapper. packed: where the documents of a micro-batch begin, in one
    sequence.
    """

    pp: int = 1
    vpp: int | None = None
    ddp: dict[str, Any] = field(default_factory=dict)
    packed: tuple[int, ...] = ()


def _config(case: Whole) -> Any:
    from megatron.core.distributed import finalize_model_grads

    more = {"num_layers": 4, "num_attention_heads": 4, "hidden_dropout": 0.0,
            "attention_dropout": 0.0, "pipeline_model_parallel_size": case.pp,
            "virtual_pipeline_model_parallel_size": case.vpp, "pipeline_dtype": case.dtype,
            "finalize_model_grads_func": finalize_model_grads}
    if case.vpp:
        more |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    return Case(**{**{name: getattr(case, name) for name in vars(Case())},
                   "native": {**more, **case.native}}).config()


def _begin(case: Whole) -> None:
    from megatron.core import parallel_state as ps
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from moe_plugin.hosts.megatron.compat import core

    core.destroy_groups()
    ps.initialize_model_parallel(
        case.tp, case.pp, case.vpp, context_parallel_size=case.cp,
        expert_model_parallel_size=case.ep, expert_tensor_parallel_size=case.etp)
    model_parallel_cuda_manual_seed(1)


def _chunks(case: Whole, config: Any, settings: dict[str, Any] | None) -> list[Any]:
    from megatron.core import parallel_state as ps
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.module import Float16Module

    from moe_plugin.hosts.megatron.compat import core
    from moe_plugin.hosts.megatron.spec import swap_moe

    chunks, wrapper = [], DistributedDataParallelConfig(
        **{"grad_reduce_in_fp32": True, **case.ddp})
    for number in range(case.vpp or 1):
        stage = number if case.vpp else None
        layers = core.gpt_block_spec(config, False, stage)
        layers = layers if settings is None else swap_moe(layers, settings, allow_none=True)
        at = {"ignore_virtual": False, "vp_stage": stage}
        model = GPTModel(
            config, layers, VOCABULARY, LENGTH, pre_process=ps.is_pipeline_first_stage(**at),
            post_process=ps.is_pipeline_last_stage(**at), position_embedding_type="rope",
            share_embeddings_and_output_weights=False, vp_stage=stage)
        for name, parameter, part in _parts(model):
            fill(parameter, name, part)
        if config.bf16:
            model = Float16Module(config, model)
        chunks.append(DistributedDataParallel(config, wrapper, model, disable_bucketing=number > 0))
    return chunks


def model_of(case: Whole, settings: dict[str, Any]) -> Any:
    """The model of a case without pipeline stages, with our layers, to evaluate."""
    _begin(case)
    [model] = _chunks(case, _config(case), settings)
    return model.eval()


def _parts(model: Any) -> Iterator[tuple[str, Any, tuple[str, int]]]:
    """(name in the whole model, parameter, which part of it is here) of each parameter."""
    from megatron.core import parallel_state as ps

    local = {f"decoder.layers.{i}.": f"decoder.layers.{layer.layer_number - 1}."
             for i, layer in enumerate(model.decoder.layers)}
    first = ps.get_expert_model_parallel_rank()
    for name, parameter in model.named_parameters():
        layer = re.match(r"decoder\.layers\.\d+\.", name)
        name = local[layer[0]] + name[layer.end():] if layer else name
        if ".experts." in name:
            yield name, parameter, ("experts", first)
        elif getattr(parameter, "tensor_model_parallel", False):
            yield name, parameter, (f"axis {parameter.partition_dim}",
                                    ps.get_tensor_model_parallel_rank())
        else:
            yield name.replace("weight_ED", "weight"), parameter, ("", 0)


def draw(name: str, shape: tuple[int, ...]) -> Tensor:
    g = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    values = torch.randn(shape, generator=g) * (0.8 if "router" in name else 0.3)
    return 1 + values if "layernorm" in name and name.endswith("weight") else values


def _experts(name: str, parameter: Any, rank: int) -> Iterator[tuple[str, Tensor]]:
    """(name of one expert's matrix, this rank's [inputs, outputs]); gradients go the same way."""
    stem, rest = name.split(".experts.")
    if rest.startswith("local_experts."):
        _, number, fc, _ = rest.split(".")
        local = 4 // _expert_ranks()
        yield f"{stem}.{rank * local + int(number)}.{fc}", parameter.t()
    else:
        fc = {"w_in_LDF": "linear_fc1", "w_out_LFD": "linear_fc2"}.get(rest, rest)
        for i, one in enumerate(parameter):
            yield f"{stem}.{rank * len(parameter) + i}.{fc}", one


def _expert_ranks() -> int:
    from megatron.core import parallel_state as ps

    return ps.get_expert_model_parallel_world_size()


@torch.no_grad()
def fill(parameter: Any, name: str, part: tuple[str, int]) -> None:
    from megatron.core import parallel_state as ps

    how, rank = part
    if how == "experts":
        for expert, value in _experts(name, parameter.data, rank):
            value.copy_(draw(expert, tuple(value.shape)))
    elif how:
        shape, axis = list(parameter.shape), int(how.split()[1])
        ranks = ps.get_tensor_model_parallel_world_size()
        shape[axis] *= ranks
        parameter.copy_(draw(name, tuple(shape)).chunk(ranks, axis)[rank])
    else:
        parameter.copy_(draw(name, tuple(parameter.shape)))


def _batches(case: Whole) -> Iterator[dict[str, Tensor]]:
    from megatron.core import parallel_state as ps

    g = torch.Generator().manual_seed(7 + ps.get_data_parallel_rank())
    for _ in range(BATCHES):
        tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=g)
        positions = torch.arange(LENGTH).expand_as(tokens)
        batch = {"input_ids": tokens, "position_ids": positions, "labels": tokens.roll(-1, 1),
                 "loss_mask": torch.ones(BATCH, LENGTH)}
        if case.packed:
            batch = {name: value.reshape(1, -1) for name, value in batch.items()}
        if case.cp > 1:  # piece r and the one as far from the end
            rank, pieces = ps.get_context_parallel_rank(), 2 * case.cp
            batch = {name: torch.cat([value.chunk(pieces, 1)[i] for i in (rank, -1 - rank)], 1)
                     for name, value in batch.items()}
        yield batch


def _packed(starts: tuple[int, ...]) -> dict[str, Any]:
    from megatron.core.packed_seq_params import PackedSeqParams

    if not starts:
        return {}
    ends = torch.tensor([*starts, BATCH * LENGTH], dtype=torch.int32)
    return {"packed_seq_params": PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=LENGTH,
        max_seqlen_kv=LENGTH, tokens_per_sample=LENGTH)}


def step(case: Whole, settings: dict[str, Any] | None) -> dict[str, Any]:
    """One rank's part of one step's gradients, by name {part: tensor}. settings: ours; None:
    Megatron's own layers.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from moe_plugin.hosts.megatron.compat import aux_losses

    _begin(case)
    aux_losses.forget_losses()
    config = _config(case)
    chunks = _chunks(case, config, settings)

    def loss_of(mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        total = (losses.view(-1).float() * mask.view(-1)).sum()
        return total, mask.sum().int(), {"loss": total.detach() / mask.sum()}

    def forward(batches: Iterator[Any], model: Any, return_schedule_plan: bool = False) -> Any:
        batch = next(batches)
        run = model
        if return_schedule_plan:
            while not hasattr(run, "build_schedule_plan"):
                run = run.module
            run = run.build_schedule_plan
        y = run(**batch, attention_mask=None, **_packed(case.packed))
        return y, partial(loss_of, batch["loss_mask"])

    several = len(chunks) > 1
    for chunk in chunks:
        chunk.train()
        chunk.zero_grad_buffer()
    iterators = [_batches(case) for _ in chunks]
    get_forward_backward_func()(
        forward_step_func=forward, data_iterator=iterators if several else iterators[0],
        model=chunks if several else chunks[0], num_microbatches=BATCHES, seq_length=LENGTH,
        micro_batch_size=BATCH, forward_only=False)
    found: dict[str, Any] = {}
    for chunk in chunks:
        bare = chunk
        while hasattr(bare, "module"):
            bare = bare.module
        for name, parameter, (how, rank) in _parts(bare):
            if not parameter.requires_grad:
                continue
            grad = parameter.main_grad.clone()
            if how == "experts":
                found |= {expert: {("", 0): value.clone()}
                          for expert, value in _experts(name, grad, rank)}
            else:
                found[name] = {(how, rank): grad}
    return found


def whole(ranks: list[dict[str, Any]]) -> dict[str, Tensor]:
    """All gradients, of what all ranks have; replicas must have the same."""
    parts: dict[str, dict[Any, Tensor]] = {}
    for rank in ranks:
        for name, mine in rank.items():
            for part, value in mine.items():
                known = parts.setdefault(name, {}).setdefault(part, value)
                torch.testing.assert_close(value, known, rtol=1e-5, atol=1e-6)
    found = {}
    for name, by_part in parts.items():
        ordered = [by_part[part] for part in sorted(by_part)]
        axis = next(iter(by_part))[0]
        found[name] = torch.cat(ordered, int(axis.split()[1])) if axis else ordered[0]
    return found


def steps(every: list[tuple[Whole, dict[str, Any] | None]]) -> list[dict[str, Any]]:
    """`step` of each, on one rank."""
    return [step(*each) for each in every]
