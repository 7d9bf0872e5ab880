"""EPS-MoE as a user has it: `--moe-prefill-pieces true`, or `parallel: {prefill: true}`.

Reference: the time of each number of pieces, by going through the exchanges and matmuls one after
the other by hand, with what the host does for each piece; and the output in one piece.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch

from moe_plugin import MoELayer
from moe_plugin.comm import Comm, Topology, run_simulated
from moe_plugin.config import from_dict, from_yaml
from moe_plugin.config.flags import add_arguments, config_from_flags
from moe_plugin.planner.choice import LayoutChoice
from moe_plugin.planner.cluster import Cluster, Link, dump_cluster
from tests.seeds import seeded

pytestmark = pytest.mark.fast
WIDTH, INNER, EXPERTS, K = 16, 64, 8, 2
ALPHA, BETA = 2e-3, 1e-7  # seconds of a message, of a byte
OPERATIONS = 50  # that the host starts for a piece


def seconds(tokens: int, pieces: int, flops_s: float, launch_s: float) -> float:
    """Dispatch, experts and combine of two ranks on two nodes: one network, one processor."""
    rows = tokens * K
    move = ALPHA + rows * WIDTH * 8 / 2 / pieces * BETA  # half of the rows stay
    compute = 2 * launch_s + 2 * 2 * rows * WIDTH * INNER / pieces / flops_s
    network = processor = 0.0
    done = []
    for _ in range(pieces):
        network += move
        processor = max(processor, network) + compute
        done.append(processor)
    for ready in done:
        network = max(network, ready) + move
    return network + (pieces - 1) * OPERATIONS * launch_s


def best(tokens: int, flops_s: float, launch_s: float) -> int:
    """The fastest number of pieces, if it saves 5 % over one."""
    times = {d: seconds(tokens, d, flops_s, launch_s) for d in (1, 2, 5, 8, 20) if d <= tokens}
    chosen = min(times, key=lambda d: (times[d], d))
    return chosen if times[chosen] <= 0.95 * times[1] else 1


def files(folder: Path, flops_s: float, launch_s: float) -> dict:
    (folder / "device.yaml").write_text(
        f"flops: {flops_s}\nhalf_rows: 0\nlaunch_s: {launch_s}\nmemory_bytes_s: 1e20\n")
    (folder / "cluster.yaml").write_text(dump_cluster(Cluster(
        nodes=2, ranks_per_node=1, inter=Link(alpha_s=ALPHA, beta_s=BETA))))
    return {"parallel": {"mode": "fixed", "prefill": True},
            "tuner": {"device": str(folder / "device.yaml")},
            "comm": {"cluster": str(folder / "cluster.yaml"), "all_to_all": "linear"}}


@pytest.mark.parametrize("flops_s,launch_s,wanted", [
    (5e8, 1e-5, {1, 2, 5}),  # matmuls take about as long as exchanges
    (5e8, 1e-3, {1, 2}),  # the host's work is what pieces cost
    (5e11, 1e-5, {1})])  # nothing to overlap
def test_pieces_are_those_of_the_reference_and_off_where_they_lose(
        flops_s: float, launch_s: float, wanted: set[int], tmp_path: Path) -> None:
    tree = files(tmp_path, flops_s, launch_s)
    loads = [3 * 2**n for n in range(13)]
    want = [best(tokens, flops_s, launch_s) for tokens in loads]
    assert set(want) == wanted
    config = from_dict({"model_dim": WIDTH, "num_experts": EXPERTS, "router": {"top_k": K},
                        "experts": {"hidden_dim": INNER}, **tree})

    def rank(comm: Comm) -> list[int]:
        with seeded(0):
            layer = MoELayer(config, comm, dtype=torch.float64).eval()
        def refuse(*_: object) -> None:
            raise AssertionError("the choice costs no collective of its own")

        comm.hosts.all_reduce, found = refuse, []
        for tokens in loads:
            # the other rank has few tokens, and takes what suits the one with most
            x_TD = torch.randn(tokens if comm.rank == 0 else 3, WIDTH, dtype=torch.float64)
            with torch.no_grad():
                out = layer(x_TD)
                whole = layer(x_TD, choice=LayoutChoice(r=1)).output
            torch.testing.assert_close(out.output, whole, rtol=1e-12, atol=1e-12)
            pieces = int(out.stats.layout.split(" d=")[1].split()[0])
            found.append(pieces)
        return found

    assert run_simulated(2, rank, topology=Topology.uniform(2, 1)) == [want] * 2


def test_flags_and_yaml_ask_for_the_same(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    flags = parser.parse_args(["--moe-prefill-pieces", "true"])
    (tmp_path / "moe.yaml").write_text(json.dumps({"parallel": {"prefill": True}}))
    config = config_from_flags(vars(flags))
    assert config.parallel.prefill
    assert config == from_yaml(str(tmp_path / "moe.yaml"))
