"""Measure training steps of `transformers` models. The models use the experts and exchanges of
`transformers`, or those of this package. All models start with the same weights and are trained in
the same processes. The models alternate after every training step.

The part on emulated nodes requires Linux and root. The study takes about ten minutes on an idle
machine with two CPU cores.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_plugin.comm import LocalComm, TorchComm
from moe_plugin.planner.units import parse_grid
from moe_plugin.utils.machine import wait_for_device
from scripts.bench.child import on_processes
from scripts.bench.measure import versions
from scripts.bench.report import columns, page
from scripts.bench.study import Option
from scripts.bench.sweep import alternate, medians, timed
from scripts.emulate import EmulatedCluster

TITLE = "Models of transformers, with their own experts and exchanges and with ours"
OURS, TUNED = "moe_plugin", "moe_plugin, auto"
EXPERTS = (OURS, "grouped_mm", "batched_mm", "eager")
# by mesh: with FSDP every rank has different tokens; with tensor parallelism all ranks have equal
# tokens, which `all_reduce` requires
EXCHANGES = {"fsdp_size": (OURS, TUNED, "all_to_all"),
             "tp_size": (OURS, TUNED, "all_to_all", "all_reduce")}
VOCABULARY, LAYERS, HEADS = 1024, 2, 4
LONGEST_WARM_UP = 30  # number of steps in which a tuner can choose
# by name: the class of the config, and its width, inner width, experts and experts per token
SHAPES: dict[str, tuple[str, dict[str, int]]] = {
    "Mixtral, 8 wide experts": ("Mixtral", {
        "hidden_size": 256, "intermediate_size": 512, "num_local_experts": 8,
        "num_experts_per_tok": 2}),
    "Qwen3, 64 fine experts": ("Qwen3Moe", {
        "hidden_size": 256, "moe_intermediate_size": 96, "num_experts": 64,
        "num_experts_per_tok": 8}),
    "OLMoE, 32 experts": ("Olmoe", {
        "hidden_size": 256, "intermediate_size": 128, "num_experts": 32,
        "num_experts_per_tok": 4}),
    "DeepSeek-V3, 16 experts and a shared one": ("DeepseekV3", {
        "hidden_size": 256, "moe_intermediate_size": 192, "n_routed_experts": 16,
        "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0,
        "q_lora_rank": 64, "kv_lora_rank": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32,
        "v_head_dim": 64}),
}


# widths and numbers of experts of published models, for a GPU
LARGE: dict[str, tuple[str, dict[str, int]]] = {
    "Mixtral 8x7B": ("Mixtral", {
        "hidden_size": 4096, "intermediate_size": 14336, "num_local_experts": 8,
        "num_experts_per_tok": 2, "num_attention_heads": 32, "num_key_value_heads": 8}),
    "Qwen3-30B-A3B": ("Qwen3Moe", {
        "hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128,
        "num_experts_per_tok": 8, "num_attention_heads": 32, "num_key_value_heads": 4}),
    "OLMoE-1B-7B": ("Olmoe", {
        "hidden_size": 2048, "intermediate_size": 1024, "num_experts": 64,
        "num_experts_per_tok": 8, "num_attention_heads": 16, "num_key_value_heads": 16}),
}


def build(shape: str, **more: Any) -> Any:
    """Build the model of the given shape with random weights."""
    import transformers

    kind, sizes = (SHAPES | LARGE)[shape]
    config = getattr(transformers, f"{kind}Config")(**{
        "vocab_size": VOCABULARY, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS, "max_position_embeddings": 8192, **sizes})
    return transformers.AutoModelForCausalLM.from_config(config, **more)


def stepper(model: Any, tokens: Tensor) -> Callable[[], float]:
    """Return a function that runs one training step with SGD and returns the loss.

    The learning rate is 0, so that losses can be compared across steps and models.
    """
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)

    def step() -> float:
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        wait_for_device(tokens.device)
        return float(loss.detach())

    return step


def data(sequences: int, length: int, part: int = 0) -> Tensor:
    """Return the token ids of one rank, [B, S]."""
    return torch.randint(VOCABULARY, (sequences, length),
                         generator=torch.Generator().manual_seed(part))


def measured(sides: Mapping[str, Callable[[], float]], steps: int) -> dict[str, Any]:
    """Time the steps of all models, which alternate after every step. For each model, return the
    step times in seconds and the last loss. All ranks start a step at the same time.
    """
    comm, losses = TorchComm() if dist.is_initialized() else LocalComm(), dict[str, float]()

    def one(name: str) -> None:
        losses[name] = sides[name]()

    seconds = alternate({name: partial(timed, comm, partial(one, name)) for name in sides}, steps)
    return {"seconds": seconds, "losses": losses}


# -- one process


def measure_one(args: argparse.Namespace, names: Sequence[str] = EXPERTS,
                device: str = "cpu") -> dict[str, Any]:
    import moe_plugin.hosts.transformers  # noqa: F401 - registers the name

    torch.set_num_threads(1)
    cells = []
    for shape in args.shapes:
        sides = {}
        for name in names:
            torch.manual_seed(0)
            with torch.device(device):
                model = build(shape, experts_implementation=name).to(
                    getattr(torch, args.dtype))
            sides[name] = stepper(model, data(args.sequences, args.length).to(model.device))
        found = measured(sides, args.steps)
        cells.append({"shape": shape, "losses": found["losses"], "seconds": medians([found])})
    return _with_sizes(cells, args, 1)


class OnGPU:
    """Measure training steps of `transformers` models on one GPU in bfloat16. The models use the
    experts of `transformers`, or those of this package. The models have two layers. The widths and
    the numbers of experts are those of published models. All models start with the same weights and
    are trained in a single process. The models alternate after every training step.
    """

    TITLE = "Models of transformers on one GPU"
    OPTIONS = {
        "shapes": Option(tuple(LARGE), "models to train", choices=(*LARGE, *SHAPES),
                         quick=tuple(SHAPES)[:1]),
        "sequences": Option(4, "sequences per step", quick=1),
        "length": Option(4096, "tokens per sequence", quick=16),
        "steps": Option(10, "timed steps of each side", quick=1),
        "device": Option("cuda", "device to train on", quick="cpu", choices=("cuda", "cpu")),
    }

    @staticmethod
    def measure(args: argparse.Namespace) -> dict[str, Any]:
        args.dtype = "bfloat16"
        found = measure_one(args, EXPERTS[:2] + EXPERTS[3:], args.device)
        return {**found, "versions": versions(args.device) | found["versions"]}

    @staticmethod
    def body(found: dict[str, Any]) -> list[str]:
        return part("Steps", "computed", found)[1:]


# -- several ranks


def run_rank(folder: str, mesh: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """For each shape, return the step times and the losses on one rank."""
    return [_shape_on_rank(Path(folder, str(number)), mesh, args)
            for number in range(len(args.shapes))]


def _shape_on_rank(folder: Path, mesh: str, args: argparse.Namespace) -> dict[str, Any]:
    import transformers
    from transformers.distributed import DistributedConfig

    from moe_plugin.hosts.transformers import use

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    use({"parallel.mode": "auto", "comm.all_to_all": "auto", "dispatch.send": "auto"}, TUNED)
    ranks = dist.get_world_size()
    tokens = data(args.sequences, args.length, dist.get_rank() if mesh == "fsdp_size" else 0)
    sides = {}
    for name in EXCHANGES[mesh]:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, args.dtype), distributed_config=DistributedConfig(
                **{mesh: ranks}, ep_size=ranks, ep_implementation=name))
        sides[name] = stepper(model, tokens)
    for _ in range(LONGEST_WARM_UP):
        sides[TUNED]()
    return measured(sides, args.steps)


def measure_ranks(grid: str, mesh: str, args: argparse.Namespace) -> dict[str, Any]:
    nodes, per_node = parse_grid(grid)
    with tempfile.TemporaryDirectory() as folder:
        for number, shape in enumerate(args.shapes):
            torch.manual_seed(0)
            build(shape).save_pretrained(Path(folder, str(number)))
        if nodes == 1:
            ranks = on_processes(per_node, gathered, folder, mesh, args)
        else:
            with EmulatedCluster(nodes, per_node, rate_bit_s=args.rate) as cluster:
                ranks = cluster.run(run_rank, folder, mesh, args, timeout_s=1800)
    cells = [{"shape": shape, "losses": by_rank[0]["losses"], "seconds": medians(by_rank)}
             for shape, by_rank in zip(args.shapes, zip(*ranks, strict=True), strict=True)]
    parts = nodes * per_node if mesh == "fsdp_size" else 1
    return _with_sizes(cells, args, parts, rate=args.rate if nodes > 1 else None)


def gathered(folder: str, mesh: str, args: argparse.Namespace) -> list[Any]:
    """Gather the results of `run_rank` from all ranks."""
    mine = run_rank(folder, mesh, args)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def _with_sizes(cells: list[dict[str, Any]], args: argparse.Namespace, parts: int,
                rate: float | None = None) -> dict[str, Any]:
    """Add model sizes and versions to the results.

    Args:
        cells: the results for each shape.
        parts: number of batches per step.
        rate: bandwidth of the nodes' links in bit/s, or None.
    """
    return {"cells": cells, "sequences": args.sequences, "length": args.length, "parts": parts,
            "steps": args.steps, "rate": rate, "dtype": args.dtype,
            "versions": {name: version(name) for name in ("torch", "transformers")}}


# -- the page


def part(title: str, about: str, found: dict[str, Any]) -> list[str]:
    thousands = found["parts"] * found["sequences"] * found["length"] / 1e3
    cells = [{**cell, "tokens": thousands, "least": min(cell["losses"].values()),
              "most": max(cell["losses"].values())} for cell in found["cells"]]
    return page(
        __name__, found, title=title, about=" ".join(
            page(__name__, {}, about, chosen=page(__name__, {}, "chosen"))),
        where="one GPU" if "device" in found["versions"] else "one thread per rank",
        network=(f" The links have a rate of {found['rate'] / 1e6:.0f} Mbit/s." if found["rate"]
                 else ""),
        table=columns(cells, {
            "model": "{shape}",
            **{f"`{name}`": f"{{tokens/seconds[{name}]:.2f}}" + (
                "" if name == OURS else f" ({{seconds[{name}]/seconds[{OURS}]:.2f}})")
               for name in cells[0]["seconds"]},
            "largest relative difference of losses": "{most/least-1:.1e}"}))


PARTS = {
    "one": (measure_one, partial(part, "One process", "computed")),
    **{name: (partial(measure_ranks, grid, mesh), partial(part, title, about))
       for name, grid, mesh, title, about in (
           ("1x2", "1x2", "fsdp_size", "Two ranks", "own"),
           ("1x2-tp", "1x2", "tp_size", "Two ranks with the same tokens", "same"),
           ("2x2", "2x2", "fsdp_size", "2x2 emulated nodes", "own"))},
}
OPTIONS = {
    "shapes": Option(tuple(SHAPES), "models to train", choices=tuple(SHAPES),
                     quick=tuple(SHAPES)[:1]),
    "sequences": Option(4, "sequences per rank", quick=1),
    "length": Option(128, "tokens per sequence", quick=16),
    "steps": Option(12, "timed steps of each side", quick=1),
    "dtype": Option("float32", "dtype of weights and activations",
                    choices=("float32", "bfloat16")),
    "rate": Option(200e6, "bandwidth of a node's link in bit/s", quick=1e9),
}
