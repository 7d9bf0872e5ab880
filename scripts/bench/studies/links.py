"""Compare a router that sends tokens according to the costs of links (TA-MoE) with the plain
router. The study uses emulated nodes with one rank each and unequal links. The study measures a
single layer, and whole training steps in Megatron and fairseq.

The study requires Linux and root, and takes about 15 minutes on an idle machine with two CPU cores.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moe_plugin import MoELayer, TorchComm
from moe_plugin.config import from_dict, to_dict, with_overrides
from moe_plugin.planner.forest.network import Network, shortest_paths
from moe_plugin.routing.links import optimal_shares
from scripts.bench.study import Option
from scripts.bench.sweep import alternate, clean_step, medians
from scripts.bench.train.run import settings_on_emulated
from scripts.bench.train.sides import Settings, parse_shapes, write_text
from scripts.emulate import EmulatedCluster
from scripts.emulate.networks import SHAPES

TITLE = "Tokens that follow the costs of links"
PLAIN, FOLLOWS = "plain", "TA-MoE"
HOSTS = ("megatron", "fairseq")


def flows(network: Network) -> dict[tuple[int, int], list[tuple[str, str]]]:
    """For each pair of ranks, return the links on the path that emulated frames take."""
    number = {name: i for i, name in enumerate(network.ranks)}
    return {(i, number[path[-1]]): list(pairwise(path)) for source, i in number.items()
            for path in shortest_paths(network, source).values()
            if path[-1] in number and len(path) > 1}


def costs_of(network: Network, own: float) -> np.ndarray:
    """Return the cost per byte for each pair of ranks [W, W]. The costs apply to an exchange in
    which all ranks send to all ranks.

    Args:
        own: cost of a byte that stays on its rank, relative to the cost on the cheapest link.
    """
    paths = flows(network)
    shared = Counter(hop for path in paths.values() for hop in path)
    rate = {wire.ends: 1e9 * float(wire.bandwidth) for wire in network.wires}
    costs_WW = np.zeros((len(network.ranks),) * 2)
    for (i, j), path in paths.items():
        costs_WW[i, j] = max(shared[hop] / rate[hop] for hop in path)
    np.fill_diagonal(costs_WW, own * costs_WW[costs_WW > 0].min())
    return costs_WW


def sides(costs: str) -> dict[str, Settings]:
    """Return the settings of the TA-MoE router and of the plain router.

    Args:
        costs: file with the costs of the links.
    """
    fixed = {"parallel.mode": "fixed", "comm.all_to_all": "linear"}
    return {PLAIN: {**fixed, "router.name": "topk"}, FOLLOWS: {
        **fixed, "router.name": "ta_moe", "router.links.costs": costs,
        "router.links.pair_capacity": 1.0, "router.links.overflow": "next"}}


def run_rank(tree: dict[str, Any], asked: dict[str, Settings], tokens: int,
             rounds: int) -> dict[str, Any]:
    """Measure both routers on one rank. The result also contains the shares of this rank's choices
    by destination rank, and the share of dropped choices.
    """
    comm, shares, dropped, layers = TorchComm(), {}, {}, {}
    for name, settings in asked.items():
        torch.manual_seed(0)
        layers[name] = MoELayer(from_dict(to_dict(with_overrides(from_dict(tree), settings))), comm)
    torch.manual_seed(1 + comm.rank)
    x_TD = torch.randn(tokens, tree["model_dim"], requires_grad=True)
    grad_TD = torch.randn_like(x_TD)
    seconds = alternate({name: lambda layer=layer: clean_step(layer, x_TD, grad_TD=grad_TD)[0]
                         for name, layer in layers.items()}, rounds)
    for name, layer in layers.items():
        ids = layer.router(x_TD.detach()).ids_TK
        load_E = torch.bincount(ids[ids >= 0], minlength=tree["num_experts"])
        shares[name] = (load_E.view(comm.size, -1).sum(1) / ids.numel()).tolist()
        dropped[name] = 1 - sum(shares[name])
    return {"seconds": seconds, "shares": shares, "dropped": dropped}


def measure_layer(name: str, args: argparse.Namespace, costs: Path,
                  cluster: EmulatedCluster, beta_WW: np.ndarray) -> dict[str, Any]:
    tree = {"model_dim": args.width, "num_experts": 2 * args.nodes, "router": {"top_k": 2},
            "experts": {"hidden_dim": args.width}}
    ranks = cluster.run(run_rank, tree, sides(str(costs)), args.tokens, args.rounds, timeout_s=900)
    moved = {side: np.array([rank["shares"][side] for rank in ranks]) for side in (PLAIN, FOLLOWS)}
    return {"network": name, "optimum": optimal_shares(beta_WW.tolist()).optimum,
            "slowest": {side: float((beta_WW * c_WW).max()) for side, c_WW in moved.items()},
            "stays": {side: float(c_WW.trace() / len(c_WW)) for side, c_WW in moved.items()},
            "dropped": max(rank["dropped"][FOLLOWS] for rank in ranks),
            "seconds": medians(ranks)}


def measure_steps(host: str, name: str, args: argparse.Namespace, costs: Path,
                  cluster: EmulatedCluster, text: str) -> dict[str, Any]:
    [shape] = parse_shapes(args.shape)
    return {"network": name, "host": host, **settings_on_emulated(
        host, shape, text, sides(str(costs)), args, cluster)}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    layers, steps = [], []
    with tempfile.TemporaryDirectory() as folder:
        text = write_text(Path(folder))
        for name in args.networks:
            network, costs = SHAPES[name](args.nodes, args.rate), Path(folder) / f"{name}.json"
            beta_WW = costs_of(network, args.own)
            costs.write_text(json.dumps(beta_WW.tolist()), encoding="utf-8")
            with EmulatedCluster(args.nodes, 1, network=network) as cluster:
                layers.append(measure_layer(name, args, costs, cluster, beta_WW))
                steps += [measure_steps(host, name, args, costs, cluster, text)
                          for host in args.hosts]
    return {"rate": args.rate, "nodes": args.nodes, "own": args.own, "tokens": args.tokens,
            "width": args.width, "layers": layers, "steps": steps}


OPTIONS = {
    "networks": Option(tuple(SHAPES), "shapes of the network", quick=("slow-node",),
                       choices=tuple(SHAPES)),
    "hosts": Option(HOSTS, "hosts of the whole steps", quick=("megatron",), choices=HOSTS),
    "nodes": Option(4, "number of nodes, with one rank each"),
    "rate": Option(100e6, "bandwidth of a normal link in bit/s", quick=1e9),
    "own": Option(0.25, "cost of a byte that stays on its rank, relative to the cheapest link"),
    "tokens": Option(1024, "tokens per rank for the layer alone", quick=64),
    "width": Option(256, "width of the layer alone", quick=16),
    "rounds": Option(9, "timed rounds of the layer alone", quick=1),
    "shape": Option("128x512x8x2x1024", "shape of the whole steps, as in `bench train --shapes`",
                    quick="16x16x8x2x128"),
    "steps": Option(7, "timed steps of each side", quick=1),
    "warm-up": Option(2, "untimed steps before the timed ones", quick=1),
}
