"""What a group of 2 to 4,096 ranks costs the host of one of them: building a layer, calling it,
tuning it, planning a live change of its experts' places, and a whole model. The code is the real
one; the other ranks are none: what they would send is at hand, and nothing is waited for.
"""

from __future__ import annotations

import argparse
import gc
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moe_plugin.comm.resharding import Resharding
from moe_plugin.config import from_dict
from moe_plugin.lab.bench.equal_ranks import EqualRanks
from moe_plugin.lab.bench.plots import log_scale, log_ticks
from moe_plugin.lab.bench.report import columns, pyplot, save_figure
from moe_plugin.lab.bench.study import ROOT, Option
from moe_plugin.layer import MoELayer
from moe_plugin.planner.resharding import TensorLayout
from moe_plugin.planner.units import show_size, show_time

TITLE = "Ranks: what a large group costs the host"
TOKENS, WIDTH, MOST_SHARDS = 64, 64, 64
KINDS_SAID = {"rows": "A row to each expert", "ranks": "A token once to each rank",
              "nodes": "A token once to each node"}
MOST_TRIED = 512 * 512  # ranks times experts: calls that gather all experts take seconds above
OPTIONS = {
    "ranks": Option((2, 8, 64, 512, 4096), "of the group", quick=(2, 8)),
    "experts": Option((64, 512, 4096), "of the layer", quick=(8,)),
    "calls": Option(20, "timed ones", quick=1),
}
# as the settings of a layer: what is compared
KINDS: dict[str, dict[str, Any]] = {
    "rows": {}, "ranks": {"dispatch": {"send": "ranks"}}, "nodes": {"dispatch": {"send": "nodes"}},
}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    layers = [_layer(kind, ranks, experts, args.calls) for kind in KINDS
              for experts in args.experts for ranks in args.ranks
              if ranks <= experts * (MOST_SHARDS if kind == "rows" else 1)]
    return {"layers": layers,
            "tuned": [_tuned(ranks, experts, args.calls) for experts in args.experts
                      for ranks in args.ranks
                      if ranks <= experts and ranks * experts <= MOST_TRIED],
            "moves": [_move(ranks, max(args.experts)) for ranks in args.ranks],
            "plans": [_search(ranks) for ranks in args.ranks if ranks >= 8]}


def _built(comm: EqualRanks, experts: int, settings: dict[str, Any]) -> tuple[
        float, MoELayer, Callable[[], None]]:
    """Processor time (s) of building a layer, the layer, and a training call of it."""
    config = from_dict({"model_dim": WIDTH, "num_experts": experts, "router": {"top_k": 2},
                        "comm": {"all_to_all": "linear"}, "experts": {"hidden_dim": WIDTH},
                        **settings})
    x_TD, built = torch.randn(TOKENS, WIDTH, requires_grad=True), list[MoELayer]()
    build_s = _seconds(lambda: built.append(MoELayer(config, comm)))
    layer = built[0]

    def call() -> None:
        out = layer(x_TD)
        torch.autograd.backward([out.output.sum(), *out.losses.values()])

    return build_s, layer, call


def _layer(kind: str, ranks: int, experts: int, calls: int) -> dict[str, Any]:
    """Processor time (s) and Python's memory (bytes, at most) of a build and of a training call."""
    build_s, _, call = _built(EqualRanks(ranks), experts,
                              {"parallel": {"mode": "fixed"}, **KINDS[kind]})
    first_s = _seconds(call)
    call()
    seconds = sorted(_seconds(call) for _ in range(calls))
    tracemalloc.start()
    call()
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return {"kind": kind, "ranks": ranks, "experts": experts, "build_s": build_s,
            "first_s": first_s, "call_s": seconds[len(seconds) // 2], "bytes": most}


def _tuned(ranks: int, experts: int, calls: int) -> dict[str, Any]:
    """Processor time (s) of a call while layouts are tried, all on one node, and of one after."""
    _, layer, call = _built(EqualRanks(ranks, per_node=ranks), experts,
                            {"parallel": {"mode": "auto"}})
    tuner, trying = layer.layouts.tuner, list[float]()
    assert tuner is not None
    while not trying or tuner.exploring:
        trying.append(_seconds(call))
    settled = sorted(_seconds(call) for _ in range(calls))
    return {"ranks": ranks, "experts": experts, "trials": len(trying),
            "trials_s": sum(trying), "settled_s": settled[len(settled) // 2]}


def _move(ranks: int, experts: int) -> dict[str, Any]:
    """Processor time (s) of planning who sends what to whom, where the experts' groups become half
    as large: of one tensor of the experts.
    """
    group = min(ranks, experts)

    def layout(size: int) -> TensorLayout:
        each = experts // size
        return TensorLayout((experts, WIDTH, WIDTH), {
            rank: ((rank % size * each, (rank % size + 1) * each), (0, WIDTH), (0, WIDTH))
            for rank in range(ranks)})

    old, new = layout(group), layout(group // 2)
    return {"ranks": ranks, "experts": experts, "before": group, "after": group // 2,
            "seconds": _seconds(lambda: Resharding(EqualRanks(ranks), old, new))}


def _search(ranks: int) -> dict[str, Any]:
    """A search over all plans of a model of 24 layers for nodes of eight H100."""
    from moe_plugin.lab.planning.model import load_model
    from moe_plugin.lab.planning.model_search import search
    from moe_plugin.planner.cluster import load_cluster
    from moe_plugin.planner.device import load_device

    configs = ROOT / "configs"
    model = load_model(configs / "plans" / "gpt_64_experts.yaml")
    model = replace(model, global_batch=max(model.global_batch, ranks))
    cluster = load_cluster(configs / "clusters" / "h100_ib.yaml").resized(ranks // 8, 8)
    device = load_device(configs / "devices" / "h100.yaml")
    found: list[Any] = []
    seconds = _seconds(lambda: found.append(search(model, cluster, device)))
    return {"ranks": ranks, "seconds": seconds, "tried": found[0].tried,
            "best": found[0].plans[0].plan.label}


def _seconds(run: Callable[[], object]) -> float:
    """Processor time of this process."""
    gc.collect()
    start = time.process_time()
    run()
    return time.process_time() - start


def body(found: dict[str, Any]) -> Iterator[str]:
    yield (f"Processor time of one rank, {TOKENS} tokens of width {WIDTH}, k = 2, float32: of "
           "building a layer (with the agreement on its settings), of the first call, and of a "
           "later one, forward and backward, the median. `memory`: the most that Python holds "
           "beyond the layer during a call. What grows with experts alone is the arithmetic of "
           "the router and of the experts that the rank has; what grows down a block of rows is "
           "what ranks cost. Where ranks are more than experts, an expert is cut over several.")
    yield "![A call over the number of ranks](ranks.svg)"
    yield "## Growth"
    yield ("The exponent b of time ~ ranks^b, fitted to the logarithms of all that was measured: "
           "0, a time that does not depend on the ranks, 1, one that grows with them. A line falls "
           "while more ranks have fewer experts each, and rises where what ranks cost is more.")
    yield columns([{"what": what, "number": len(points), "least": min(points), "most": max(points),
                    "b": exponent(points)} for what, points in lines(found) if len(points) > 1], {
        "what": "{what}", "ranks": "{least:,} to {most:,}", "numbers of ranks": "{number}",
        "b": "{b:+.2f}"})
    for kind, about in KINDS_SAID.items():
        yield f"## {about}"
        yield columns([one for one in found["layers"] if one["kind"] == kind], {
            "experts": "{experts:,}", "ranks": "{ranks:,}",
            "build": lambda one: show_time(one["build_s"]),
            "first call": lambda one: show_time(one["first_s"]),
            "call": lambda one: show_time(one["call_s"]),
            "memory": lambda one: show_size(one["bytes"])})
    if "tuned" in found:  # older numbers have neither
        yield from _changes(found)
    yield "## Planning a whole model"
    yield ("`moe-plugin plan` of `configs/plans/gpt_64_experts.yaml` (at least a sequence a rank) "
           "on nodes of eight H100: every plan of the space is bounded, and tried where its bound "
           "is below the best.")
    yield columns(found["plans"], {
        "ranks": "{ranks:,}", "time": lambda one: show_time(one["seconds"]),
        "layouts tried": "{tried:,}", "best": "{best}"})


def exponent(points: Mapping[int, float]) -> float:
    """b of seconds ~ ranks^b. points: seconds by ranks, at least two."""
    return float(np.polyfit(np.log(list(points)), np.log(list(points.values())), 1)[0])


def lines(found: dict[str, Any]) -> Iterator[tuple[str, dict[int, float]]]:
    """What was measured over numbers of ranks, with seconds by ranks."""
    for kind, about in KINDS_SAID.items():
        for experts, points in calls_of(found, kind).items():
            yield f"a call, {about[0].lower()}{about[1:]}, {experts:,} experts", points
    tuned = found.get("tuned", [])
    for experts in dict.fromkeys(one["experts"] for one in tuned):
        yield f"a call that tries layouts, {experts:,} experts", {
            one["ranks"]: one["trials_s"] / one["trials"] for one in tuned
            if one["experts"] == experts}
    yield "planning a change of places", {one["ranks"]: one["seconds"]
                                          for one in found.get("moves", [])}
    yield "planning a whole model", {one["ranks"]: one["seconds"] for one in found["plans"]}


def calls_of(found: dict[str, Any], kind: str) -> dict[int, dict[int, float]]:
    """Seconds of a call by experts and ranks."""
    made: dict[int, dict[int, float]] = {}
    for one in found["layers"]:
        if one["kind"] == kind:
            made.setdefault(one["experts"], {})[one["ranks"]] = one["call_s"]
    return made


def draw(found: dict[str, Any], path: Path) -> None:
    """A call over the number of ranks: a panel for each kind, a line for each number of experts."""
    figure, axes = pyplot().subplots(1, len(KINDS_SAID), figsize=(11, 4), sharey=True,
                                     layout="constrained")
    for axis, (kind, about) in zip(axes, KINDS_SAID.items(), strict=True):
        for experts, points in calls_of(found, kind).items():
            axis.plot(list(points), [1e3 * s for s in points.values()], "o-",
                      label=f"{experts:,} experts")
        axis.set(title=about, xlabel="ranks")
        log_ticks(axis, [one["ranks"] for one in found["layers"]], "{:,}".format)
        axis.grid(alpha=0.3)
    log_scale(axes[0])
    axes[0].set_ylabel("a call on one rank, ms of its processor")
    axes[0].legend(frameon=False)
    save_figure(figure, path)


PLOTS = {"ranks.svg": draw}


def _changes(found: dict[str, Any]) -> Iterator[str]:
    yield "## Choosing the layout"
    yield ("`parallel.mode: auto`, all ranks as one node: training calls until the layer has "
           "settled, each with its agreement among the ranks on what was measured, and one of the "
           "layout that it settled on.")
    yield columns(found["tuned"], {
        "experts": "{experts:,}", "ranks": "{ranks:,}", "calls that try": "{trials}",
        "one of them": lambda one: show_time(one["trials_s"] / one["trials"]),
        "settled": lambda one: show_time(one["settled_s"])})
    yield "## Changing the experts' places"
    yield ("`change_expert_parallel` to groups of half the size, of one tensor of the experts: "
           "planning who sends what to whom, without sending it. Once for each tensor and its "
           "optimizer state, at a change.")
    yield columns(found["moves"], {
        "ranks": "{ranks:,}", "experts": "{experts:,}", "groups": "{before:,} to {after:,}",
        "time": lambda one: show_time(one["seconds"])})
