"""Compare published results with the planner's predictions and with this project's measurements.

The study takes a few seconds, because predictions are computed and measurements are read from the
committed data of the other studies. With --measure, the study also measures mechanisms that no
other study covers. With --measure, it takes about four minutes on an idle machine, and requires
Linux, root and timm.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn

from moe_plugin import MoELayer, TorchComm
from moe_plugin.comm import Comm, LocalComm
from moe_plugin.comm.functional import enter, gather, split, sum_parts
from moe_plugin.config import from_dict
from moe_plugin.hosts.plain.blocks import blocks_in
from moe_plugin.hosts.timm.model import PRESETS, SwinMoE, build
from moe_plugin.kernels.choices import running_count
from moe_plugin.planner.choice import LayoutChoice
from scripts.bench import headline_models as models
from scripts.bench import headline_ratios as measured_ratios
from scripts.bench import layer
from scripts.bench.measure import interleaved
from scripts.bench.peers.fairseq_branch import BranchMoE
from scripts.bench.problem import Problem
from scripts.bench.report import PAGES, bullets, filled, page
from scripts.bench.studies.vision import forward_of, step_of
from scripts.bench.study import DATA, ROOT, Option, check_needs, read_numbers, with_machine
from scripts.bench.sweep import alternate, one_step, slowest, timed
from scripts.emulate import EmulatedCluster

TITLE = "Published results, predicted and measured"
QUARTER = 0.25
NUMBERS = ROOT / "docs" / "benchmarks" / DATA
OPTIONS = {
    "measure": Option(False, "also measure the results that no other study covers"),
    "rounds": Option(15, "number of timed rounds with --measure", quick=2),
}
CHOICES, IMAGES, CLASSES, RATE = 16384, 8, 10, 200e6  # RATE: bandwidth of a node's link in bit/s
FIVE_BLOCKS = replace(PRESETS["swin_s"], depths=(1, 1, 2, 1), moe_blocks=((), (), (1,), (0,)))
SWITCH = {"router.name": "topk", "router.top_k": 1, "router.normalize": "none",
          "dispatch.capacity_factor": 1.0, "losses": {"switch": 0.01}}
PARM = {"plain": {}, "s1": {"replicas": 2, "schedule": "s1"},
        "s2": {"replicas": 2, "schedule": "s2"}}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    here, committed = None, NUMBERS / "headlines.json"
    if args.measure:
        here = measured_here(args.rounds, PRESETS["tiny"] if args.quick else FIVE_BLOCKS)
    elif committed.exists():
        here = read_numbers(committed)["here"]
    published = yaml.safe_load((PAGES / "headlines.yaml").read_text(encoding="utf-8"))
    stated = models.stated()
    return {"rows": [plain(row, stated, here) for row in published], "here": here}


# -- rows


def plain(row: Mapping[str, Any], stated: Mapping[str, Any],
          here: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a published result (an item of `headlines.yaml`) with our prediction and our
    measurement as plain values. `stated` are the predicted values in the texts, and `here` the data
    measured by this study, if any.
    """
    found = {
        **{key: row.get(key) for key in ("system", "result", "said", "value")},
        "percent": row.get("percent", False), "hardware": row["hardware"],
        **{key: filled(row.get(key, ""), stated) for key in ("source", "model", "why")},
        "predicted": None, "measured": None, "page": "", "what": row.get("needs", "")}
    if "predict" in row:
        name, *given = row["predict"]
        found["predicted"] = _range(getattr(models, name)(*given))
    if measured := row.get("measured"):
        (name, *given), source = measured["numbers"], measured.get("page", "")
        of = read_numbers(NUMBERS / f"{source}.json") if source else here
        found |= {"what": measured["what"], "page": source, "measured": _range(
            getattr(measured_ratios, name)(of, *given))} if of else {"what": "`--measure`"}
    return checked(found)


def _range(values: Any) -> list[float]:
    several = [values] if isinstance(values, float | int) else list(values)
    return [float(f"{value:.4g}") for value in (min(several), max(several))]


def ratios(row: Mapping[str, Any]) -> list[float] | None:
    """Return the smallest and largest ratio of the predicted to the published result, or None if
    one of the results is missing.

    If the results are speedup factors, the ratio compares the gains. For example, a predicted
    factor of 1.05 and a published factor of 1.32 have the ratio 0.16. If the results are shares
    (`percent`), they are compared directly.
    """
    if row["predicted"] is None or row["value"] is None:
        return None
    base = 0 if row["percent"] else 1
    return [(value - base) / (row["value"] - base) for value in row["predicted"]]


def misses(row: Mapping[str, Any]) -> bool:
    """Return whether any value in the prediction differs from the published value by more than a
    quarter.
    """
    return any(abs(ratio - 1) > QUARTER for ratio in ratios(row) or ())


def checked(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row.

    Raises:
        ValueError: if the row lacks a field that readers need to assess the result.
    """
    wanted = {key: True for key in ("source", "hardware", "model")}
    wanted |= {"why": misses(row), "what": True, "value": row["predicted"] is not None}
    for key in (key for key, needed in wanted.items() if needed and not row[key]):
        raise ValueError(f"headline {row['system']}, {row['result']}: {key} is missing. A row "
                         "must state source, hardware, model and what was measured (or what a "
                         "measurement needs), and the reason for an error above a quarter")
    if (row["predicted"] is None) != row["model"].startswith("not modelled: "):
        raise ValueError(f"headline {row['system']}, {row['result']}: model must begin with 'not "
                         "modelled: ' if and only if the row has no prediction")
    return row


# -- measurements that no other study covers


class BranchBlock(nn.Module):
    """The layer of fairseq's `moe` branch, in a block that replaces `MoEBlock`.

    Attributes:
        loss: balance loss of the last call.
    """

    def __init__(self, width: int, inner: int, experts: int) -> None:
        super().__init__()
        self.branch = BranchMoE(width, inner, experts, 1, LocalComm(), F.gelu)
        self.loss = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        y_SD, self.loss = self.branch(x.flatten(0, -2))
        return y_SD.view_as(x)


def measured_here(rounds: int, swin: SwinMoE) -> dict[str, Any]:
    check_needs("--measure (which can be left out)", ("nodes", "timm"))
    return with_machine(lambda: {
        "counts": counts(4 * rounds), "switch": switch(rounds),
        "parm": on_nodes(parm_rank, rounds), "ppmoe": on_nodes(ppmoe_rank, rounds),
        "swin": swin_steps(swin, 1 + rounds // 3)})


def counts(rounds: int) -> list[dict[str, float]]:
    """For a given mask, return the time of fairseq's `cumsum(mask, 0) - 1` divided by the time of
    our own counting function.
    """
    found = []
    for experts in (8, 64, 256):
        ids_N = torch.randint(experts, (CHOICES,), generator=torch.Generator().manual_seed(0))
        mask_NE = F.one_hot(ids_N, experts)
        theirs, ours = interleaved([
            lambda mask_NE=mask_NE: mask_NE.cumsum(0) - 1,
            lambda ids_N=ids_N, experts=experts: running_count(ids_N, experts)],
            torch.device("cpu"), rounds)
        found.append({"experts": experts, "ratio": theirs.best / ours.best})
    return found


def switch(rounds: int) -> dict[str, float]:
    """Return the times of other layers divided by the time of our layer, with a switch gate and 32
    sequences of 128 tokens.
    """
    found = layer.run(Problem(tokens=32 * 128, model_dim=256, hidden_dim=1024, experts=16,
                              top_k=1), ["einsum"], rounds)
    return {one["name"]: one["min_ms"] / found["min_ms"] for one in layer.results(found)}


def swin_steps(size: SwinMoE, rounds: int) -> dict[str, float]:
    """Return the time of SwinV2-MoE with the layers of fairseq's `moe` branch divided by the time
    with our layers.

    Both models use a plain top-1 gate.
    """
    drawn = torch.Generator().manual_seed(1)
    ours, theirs = (build(replace(size, settings=SWITCH), CLASSES) for _ in range(2))
    branches = []
    for name, block in list(blocks_in(theirs)):
        config, (place, _, child) = block.moe.config, name.rpartition(".")
        branches.append(BranchBlock(config.model_dim, config.experts.hidden_dim, size.experts))
        setattr(theirs.get_submodule(place), child, branches[-1])
    x_BCSS = torch.randn(IMAGES, 3, size.image, size.image, generator=drawn)
    y_B = torch.randint(CLASSES, (IMAGES,), generator=drawn)

    def branch_step() -> None:
        theirs.train().zero_grad()
        loss = F.cross_entropy(theirs(x_BCSS), y_B)
        (loss + 0.01 * sum(branch.loss for branch in branches)).backward()

    times = interleaved([branch_step, step_of(ours, x_BCSS, y_B), forward_of(theirs, x_BCSS),
                         forward_of(ours, x_BCSS)], torch.device("cpu"), rounds, warmup=1)
    return {kind: times[2 * i].best / times[2 * i + 1].best
            for i, kind in enumerate(("training", "inference"))}


def on_nodes(rank: Callable[[int], dict[str, Any]], rounds: int) -> dict[str, float]:
    """Run `rank` on two emulated nodes of two ranks each. For each variant, return the time in
    seconds of the fastest forward and backward pass on the slowest rank.
    """
    with EmulatedCluster(2, 2, rate_bit_s=RATE) as cluster:
        ranks = cluster.run(rank, rounds, timeout_s=300)
    return {name: min(slowest(ranks, name)) for name in ranks[0]["seconds"]}


def parm_rank(rounds: int) -> dict[str, Any]:
    """Measure Parm's schedules on one rank. The two ranks of a node have the same tokens, and each
    of them stores half of each expert.
    """
    comm, layers = TorchComm(), {}
    for name, schedule in PARM.items():
        layers[name] = MoELayer(from_dict({
            "model_dim": 256, "num_experts": 2, "router": {"top_k": 2},
            "experts": {"hidden_dim": 256}, "comm": {"all_to_all": "linear"},
            "dispatch": {"name": "padded", "capacity_factor": 1.2},
            "parallel": {"shards": 2, **schedule}}), comm)
    torch.manual_seed(1 + comm.rank // 2)
    return {"seconds": alternate({name: lambda one=one: one_step(one, 512, LayoutChoice(r=2))[0]
                                  for name, one in layers.items()}, rounds)}


def ppmoe_rank(rounds: int) -> dict[str, Any]:
    """Measure the blocks of `TensorParallelBlocks` on one rank, with three kinds of last layer.

    "dense" is a dense feed-forward layer, which is the backbone. "inside" is PPMoE: each node
    stores all experts, and its two ranks have the same tokens. "across" distributes the experts
    over all ranks of both nodes, and the ranks of a node divide its tokens.
    """
    comm = TorchComm()
    node = comm.contiguous_subgroup(2)
    settings = {"model_dim": 256, "num_experts": 16, "router": {"top_k": 1},
                "experts": {"hidden_dim": 1024}, "comm": {"all_to_all": "linear"}}
    inside = MoELayer(from_dict({**settings, "dispatch": {"name": "index_slice"}}), node)
    across = MoELayer(from_dict({**settings, "parallel": {"mode": "fixed"}}), comm)
    blocks = TensorParallelBlocks(node)
    torch.manual_seed(1 + comm.rank // 2)  # each node computes different tokens
    x_TD = torch.randn(512, 256)

    def step(last: Callable[[Tensor], Tensor]) -> None:
        blocks(x_TD.clone().requires_grad_(), last).square().mean().backward()

    last_layers: dict[str, Callable[[Tensor], Tensor]] = {
        "dense": blocks.feed_forward, "inside": lambda x_TD: inside(x_TD).output,
        "across": lambda x_TD: gather(across(split(x_TD, node)).output, node)}
    return {"seconds": alternate({name: partial(timed, comm, partial(step, last))
                                  for name, last in last_layers.items()}, rounds)}


class TensorParallelBlocks(nn.Module):
    """Two transformer blocks whose weights are sharded over the ranks of a node, as in Megatron.

    All ranks of the node have the same tokens [T, D], which form sequences of 128 tokens. The first
    block has a dense feed-forward layer. The feed-forward layer of the second block is passed to
    `forward`.
    """

    def __init__(self, node: Comm, width: int = 256, inner: int = 1024, heads: int = 8) -> None:
        super().__init__()
        self.node, self.heads = node, heads // node.size
        part = width // node.size
        self.qkv, self.out = nn.Linear(width, 3 * part), nn.Linear(part, width)
        self.first, self.second = (nn.Linear(width, inner // node.size),
                                   nn.Linear(inner // node.size, width))

    def forward(self, x_TD: Tensor, last: Callable[[Tensor], Tensor]) -> Tensor:
        for feed_forward in (self.feed_forward, last):
            x_TD = x_TD + self.attention(x_TD)
            x_TD = x_TD + feed_forward(x_TD)
        return x_TD

    def attention(self, x_TD: Tensor) -> Tensor:
        q, k, v = (part.unflatten(1, (self.heads, -1)).unflatten(0, (-1, 128)).transpose(1, 2)
                   for part in self.qkv(self._enter(x_TD)).chunk(3, -1))
        y_BHSD = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return sum_parts(self.out(y_BHSD.transpose(1, 2).flatten(0, 1).flatten(1)), self.node)

    def feed_forward(self, x_TD: Tensor) -> Tensor:
        return sum_parts(self.second(F.gelu(self.first(self._enter(x_TD)))), self.node)

    def _enter(self, x_TD: Tensor) -> Tensor:
        return enter(x_TD, x_TD.new_zeros(len(x_TD), 1), None, self.node)[0]


# -- the page


def body(found: dict[str, Any]) -> list[str]:
    every, here = [checked(row) for row in found["rows"]], found["here"]
    modelled = [row for row in every if ratios(row)]
    near = sum(not misses(row) for row in modelled)
    return page(
        __name__, {}, every=every, modelled=len(modelled), near=near, far=len(modelled) - near,
        unmodelled=len(every) - len(modelled),
        seen=sum(row["measured"] is not None for row in every),
        measured=page(__name__, here, "measured") if here else [],
        rows=[{**row, "number": number,
               "predicted": _shown(row["predicted"], row["percent"]) or "not modelled",
               "ratio": _span([f"{ratio:.2f}" for ratio in ratios(row) or ()] or [""]),
               "measured": _shown(row["measured"], row["percent"]) or "not measured"}
              for number, row in enumerate(every, 1)],
        notes=bullets(*_notes(every)))


def _shown(values: Sequence[float] | None, percent: bool) -> str:
    if values is None:
        return ""
    return _span([f"{100 * v:.0f}" if percent else f"{v:.2f}" for v in values]) + (
        " %" if percent else " x")


def _span(ends: Sequence[str]) -> str:
    return ends[0] if ends[0] == ends[-1] else " to ".join(ends)


def _notes(every: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield one bullet for each row, with the source, the model, the reason for an error, and the
    measurement, except for items that are the same as in the previous row. Rows with the same notes
    share a bullet.
    """
    made: list[tuple[list[str], list[str]]] = []  # numbers, sentences
    before: list[str] = [""] * 3
    for number, row in enumerate(every, 1):
        page = f"[{row['page']}]({row['page']}.md)" if row["page"] else "this page"
        now = [f"Source: {row['source']}.", row["model"][:1].upper() + row["model"][1:], (
            f"Measured: {row['what']} ({page})." if row["measured"] else
            f"Not measured: this needs {row['what']}.")]
        source, model, how = ("" if a == b else a for a, b in zip(now, before, strict=True))
        parts = [source, model, "Reason for the error: " * misses(row) + row["why"], how]
        if any(parts) or not made:
            made.append(([], parts))
        made[-1][0].append(str(number))
        before = now
    for rows, parts in made:
        yield " ".join(filter(None, (f"**{', '.join(rows)}**", *parts)))
