"""Measures the ranks that run: their network, their processors, and parts of a model on them.

All ranks measure at the same time, and each repeat counts with the slowest of them, so that every
rank has the same numbers.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from moe_plugin.cli.measure.all_to_all import Plan, measure_rank
from moe_plugin.cli.measure.device import Samples, sample_device
from moe_plugin.cli.measure.tensor_parallel import TensorParallelBlock, tensor_group, tensor_ranks
from moe_plugin.cli.planning.launch import moe_settings
from moe_plugin.comm import Comm, LocalComm
from moe_plugin.comm.torch_comm import default_comm
from moe_plugin.config import from_dict
from moe_plugin.layer import MoELayer
from moe_plugin.machine import device_name, memory_bytes, wait_for_device
from moe_plugin.planner.all_to_all_cost import COSTS
from moe_plugin.planner.choice import LayoutChoice
from moe_plugin.planner.cluster import Cluster
from moe_plugin.planner.device import Device
from moe_plugin.planner.fit import Measurement, fit
from moe_plugin.planner.measured import (
    ALL_GATHER,
    ALL_REDUCE,
    DENSE,
    HEAD,
    MATMUL,
    MOE,
    REDUCE_SCATTER,
    TENSOR,
    UPDATE,
    UPDATES,
    MeasuredNetwork,
    Processor,
    Timing,
)
from moe_plugin.planner.model import ModelPlan, ModelShape
from moe_plugin.planner.trust import layer_of_rank, times_more

KIB, MIB = 1 << 10, 1 << 20
# bytes per rank: 4 KiB, four times as many, and so on
FIRST_SIZE, LEAST_SIZE, MOST_SIZE = 4 * KIB, 4 * MIB, 64 * MIB
MICRO_BATCHES = (1, 2, 4, 8)
ENOUGH_S = 0.5  # no larger size is measured after one that takes longer
PLAIN = LayoutChoice(r=1)
LEAST_S = 0.02  # of a repeat of what takes little time
PARAMETERS, SMALL = 4 * MIB, 64  # of the optimizer's steps: of one tensor, small ones


@contextlib.contextmanager
def own_ranks(cuda: bool) -> Iterator[Comm]:
    """The ranks that a launcher has started, one group; one process alone is a group of one."""
    started = {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= set(os.environ)
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if started:
        dist.init_process_group("nccl" if cuda else "gloo")
    try:
        yield default_comm()
    finally:
        if started:
            dist.destroy_process_group()


def grid_of(comm: Comm) -> tuple[int, int]:
    """(nodes, ranks per node); collective.

    Raises: ValueError: nodes have different numbers of ranks.
    """
    nodes = comm.prepare().nodes
    sizes = sorted({len(node) for node in nodes})
    if len(sizes) > 1:
        raise ValueError(f"nodes have {sizes} ranks: plans need nodes of one size; start as many "
                         "ranks on each node")
    return len(nodes), sizes[0]


def rank_memory(device: torch.device, ranks_per_node: int) -> float:
    """Bytes that a rank may use: the ranks of a node share its memory, but have a GPU each."""
    memory = float(memory_bytes(device) or Device().memory_bytes)
    return memory if device.type == "cuda" else memory / ranks_per_node


def largest_size(model: ModelShape) -> int:
    """Bytes per rank up to which the network is measured for a model, a power of four of KiB."""
    rows = model.layer(MICRO_BATCHES[-1] * model.sequence)
    wanted = max(rows.rows * rows.row_bytes, 4 * model.dense_parameters)
    size = LEAST_SIZE
    while size < min(wanted, MOST_SIZE):
        size *= 4
    return size


def about_network(model: ModelShape, grid: tuple[int, int], device: torch.device) -> dict[str, str]:
    """What another run's network has in common with this one, if it may be taken for it."""
    return {
        "collectives": f"{ALL_REDUCE}, {ALL_GATHER}, {REDUCE_SCATTER}",
        "bytes": str(largest_size(model)), "grid": f"{grid[0]}x{grid[1]}",
        "backend": dist.get_backend(), "device": device_name(device), "torch": torch.__version__
    }


def about_processor(model: ModelShape, comm: Comm, device: torch.device,
                    ranks_per_node: int) -> dict[str, str]:
    """The same of processors: ranks of one machine share it."""
    return {
        "device": device_name(device), "ranks": str(comm.size),
        "tensor_ranks": str(tensor_ranks(model, ranks_per_node)),
        "threads": str(torch.get_num_threads() if device.type == "cpu" else 0),
        "model": " ".join(f"{name}={getattr(model, name)}" for name in (
            "model_dim", "ffn_dim", "expert_dim", "row_dim", "heads", "vocab", "sequence",
            "experts", "top_k", "capacity_factor", "gated", "element_bytes")),
        "layer": "without exchanges", "torch": torch.__version__
    }


def measure_network(model: ModelShape, comm: Comm, grid: tuple[int, int], about: dict[str, str],
                    nics: int, repeats: int) -> MeasuredNetwork:
    """All-to-alls by algorithm and size, the other collectives by size, and the cluster that fits
    the all-to-alls.
    """
    sizes = [FIRST_SIZE * 4**i for i in range(20) if FIRST_SIZE * 4**i <= largest_size(model)]
    shape = Cluster(name="measured", nodes=grid[0], ranks_per_node=grid[1], nics=nics)
    timings: list[Timing] = []
    for size in sizes:
        _, cells = measure_rank(Plan(tuple(COSTS), (size,), repeats), comm)
        timings += [Timing(name=c.name, size=c.size, seconds=c.seconds) for c in cells]
        if size >= LEAST_SIZE and timings[-1].median > ENOUGH_S:
            break
    found = fit([Measurement(*grid, t.name, t.size, t.median) for t in timings], shape)
    ranks, gathers = comm.size, comm.collectives
    timings += _collective(ALL_REDUCE, comm, sizes, repeats, comm.all_reduce)
    # of a whole of these sizes, as layers that gather weights or tokens run them
    timings += _collective(ALL_GATHER, comm, sizes, repeats,
                           lambda x: gathers.all_gather(comm, x), part=ranks)
    timings += _collective(REDUCE_SCATTER, comm, sizes, repeats,
                           lambda x: gathers.reduce_scatter(comm, x), part=ranks, given=ranks)
    return MeasuredNetwork(about=about, cluster=found.cluster, timings=timings)


def _collective(name: str, comm: Comm, sizes: Sequence[int], repeats: int,
                run: Callable[[Tensor], object], part: int = 1, given: int = 1) -> list[Timing]:
    """By size of the whole, until one takes long enough.

    Args:
        part: what counts is so small a part of the whole.
        given: `run` gets so many parts.
    """
    found: list[Timing] = []
    for size in sizes:
        numbers = -(-size // (4 * part))
        x = torch.zeros(given * numbers, device=comm.device)
        found.append(Timing(name=name, size=4 * numbers, seconds=_repeats(
            comm, lambda x=x: run(x), repeats)))
        if size >= LEAST_SIZE and found[-1].median > ENOUGH_S:
            break
    return found


def measure_processor(model: ModelShape, comm: Comm, device: torch.device, memory: float,
                      about: dict[str, str], repeats: int, ranks_per_node: int) -> Processor:
    """Matmuls of the experts' widths, and parts of the model by numbers of tokens.

    Args:
        memory: bytes of a rank; an MoE layer that takes more than a part of it is measured with
            fewer experts.
        ranks_per_node: those that can be tensor-parallel.
    """
    dtype = torch.float32 if model.element_bytes == 4 else torch.bfloat16
    where = f"cuda:{device.index or 0}" if device.type == "cuda" else "cpu"
    comm.barrier()
    samples = _slowest(comm, sample_device(where, dtype, model.model_dim, model.expert_dim,
                                           repeats, LEAST_S))
    timings = [Timing(name=MATMUL, size=rows, seconds=seconds)
               for rows, seconds in samples.products.items()]
    model = _smaller(model, comm.size, memory)
    timings += _moe_layer(comm, model, device, dtype, repeats)
    block = TensorParallelBlock(model).to(device=device, dtype=dtype)
    timings += _by_tokens(DENSE, comm, model, device, dtype, repeats, block)
    cut = tensor_ranks(model, ranks_per_node)
    if cut > 1:
        part = TensorParallelBlock(model, tensor_group(cut, comm.size)).to(device, dtype)
        timings += _by_tokens(TENSOR, comm, model, device, dtype, repeats, part, cut)
    if model.vocab:
        head = nn.Linear(model.model_dim, model.vocab, bias=False, device=device, dtype=dtype)

        def loss(x_LSD: Tensor) -> Tensor:
            # with what is before the first layer: rows of a table, and their gradients
            tokens_LS = torch.zeros(x_LSD.shape[:2], dtype=torch.int64, device=device)
            x_LSD = x_LSD + F.embedding(tokens_LS, head.weight)
            logits_TV = head(x_LSD).flatten(0, 1).float()
            return F.cross_entropy(logits_TV, logits_TV.new_zeros(len(logits_TV)).long())

        timings += _by_tokens(HEAD, comm, model, device, dtype, repeats, loss)
    timings += [_update(UPDATE, comm, device, repeats, [PARAMETERS], PARAMETERS),
                _update(UPDATES, comm, device, repeats, [1] * SMALL, SMALL)]
    return Processor(about=about, device=samples.device(memory, device_name(device)), model=model,
                     timings=timings, tensor_ranks=cut)


def _moe_layer(comm: Comm, model: ModelShape, device: torch.device, dtype: torch.dtype,
               repeats: int) -> list[Timing]:
    """What a rank computes in one, without its exchanges, which the network's measurements are
    for: layouts have others.
    """
    shape = layer_of_rank(model, comm.size)
    plan = ModelPlan(tp=1, pp=1, dp=1, ep=1, etp=1, micro_batch=1, layout=PLAIN)
    local = replace(model, experts=shape.experts, top_k=shape.top_k, hidden_dim=shape.hidden_dim)
    layer = MoELayer(from_dict({"model_dim": model.model_dim, **moe_settings(
        local, plan, auto=False)}), LocalComm()).to(device=device, dtype=dtype)
    return _by_tokens(MOE, comm, model, device, dtype, repeats, lambda x_LSD: layer(x_LSD).output,
                      more=times_more(model, shape))


def _smaller(model: ModelShape, ranks: int, memory: float) -> ModelShape:
    """With experts that fit an eighth of the memory and divide over the ranks; at least one on each
    rank, or one for several where experts are fewer.
    """
    if model.experts < ranks and ranks % model.experts == 0:
        return model
    each = 2 * model.layer(1).expert_bytes  # with its gradient
    here = min(max(1, model.experts // ranks), max(1, int(memory / 8 / each)))
    return replace(model, experts=here * ranks, top_k=min(model.top_k, here * ranks))


def _by_tokens(name: str, comm: Comm, model: ModelShape, device: torch.device, dtype: torch.dtype,
               repeats: int, forward: Callable[[Tensor], Tensor], cut: int = 1,
               more: int = 1) -> list[Timing]:
    """Forward and backward of one, two, four, eight sequences, until one takes long enough.

    Args:
        forward: of [L / cut, S, D], on `cut` tensor-parallel ranks.
        more: it gets so many times as many sequences as count.
    """
    found: list[Timing] = []
    for sequences in MICRO_BATCHES:
        x_LSD = torch.randn(model.sequence // cut, more * sequences, model.model_dim, device=device,
                            dtype=dtype, requires_grad=True)
        found.append(Timing(name=name, size=sequences * model.sequence, seconds=_repeats(
            comm, lambda x=x_LSD: forward(x).float().square().mean().backward(), repeats, device)))
        if found[-1].median > ENOUGH_S:
            break
    return found


def _update(name: str, comm: Comm, device: torch.device, repeats: int, sizes: list[int],
            size: int) -> Timing:
    """Clipping and Adam over tensors of these sizes in float32."""
    parts = [torch.zeros(one, device=device, requires_grad=True) for one in sizes]
    for part in parts:
        part.grad = torch.ones_like(part)
    optimizer = torch.optim.AdamW(parts)

    def step() -> None:
        nn.utils.clip_grad_norm_(parts, 1.0)
        optimizer.step()

    return Timing(name=name, size=size, seconds=_repeats(comm, step, repeats, device))


def _repeats(comm: Comm, run: Callable[[], object], repeats: int,
             device: torch.device | None = None) -> list[float]:
    """Seconds of each repeat, on the slowest rank; all begin together, once without a clock."""
    where, seconds = device or comm.device, []
    run()
    for _ in range(repeats):
        comm.barrier()
        wait_for_device(where)
        begin = time.perf_counter()
        run()
        wait_for_device(where)
        seconds.append(time.perf_counter() - begin)
    return comm.agree_max(seconds)


def _slowest(comm: Comm, samples: Samples) -> Samples:
    """Each repeat as on the slowest rank."""
    return replace(samples, launch=comm.agree_max(samples.launch),
                   copy=comm.agree_max(samples.copy),
                   products={n: comm.agree_max(s) for n, s in samples.products.items()})
