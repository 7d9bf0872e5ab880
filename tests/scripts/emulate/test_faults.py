"""What happens when ranks, nodes and links fail: every survivor gets an error within the time-out,
or the exchange goes on; none hangs.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moe_plugin.comm import CommError, TorchComm, algorithms
from moe_plugin.config import CommConfig
from moe_plugin.tuning.prepare_group import prepare
from scripts.emulate import EmulatedCluster, RankEnd, RankProcess

pytestmark = pytest.mark.distributed
Make = Callable[..., EmulatedCluster]
TIMEOUT_S = 4.0
ROUNDS = 100_000
WELL_IN = 3
NODES, PER_NODE = 3, 2


def _exchange_until(name: str, rounds: int, watchdog_s: float, folder: Path | None = None) -> dict:
    """Exchange until `rounds` are done or an error comes. Says how far it came, and when and how it
    ended.
    """
    comm = TorchComm(timeout_s=TIMEOUT_S)
    algorithm = prepare(comm, CommConfig(all_to_all=name, watchdog_s=watchdog_s,
                                         timeout_s=TIMEOUT_S))
    x = torch.arange(comm.size * 2000.0)
    want = x.view(comm.size, -1)[comm.rank].repeat(comm.size)
    done, text, begun = 0, None, time.monotonic()
    try:
        while done < rounds:
            begun = time.monotonic()
            assert torch.equal(algorithm(comm, x), want)
            done += 1
            if done == WELL_IN and folder is not None:
                (folder / f"{comm.rank} is well in").touch()
            if rounds > 100:
                time.sleep(0.02)
    except CommError as error:
        text = str(error)
    ended = time.monotonic()
    if text is not None:
        dist.destroy_process_group()  # the group is dead: no rank may wait in it
    return {"done": done, "error": text, "waited": ended - begun, "ended": ended}


def _start(cluster: EmulatedCluster, folder: Path, name: str, rounds: int = ROUNDS,
           watchdog_s: float = 0.0) -> list[RankProcess]:
    return _well_in(cluster, folder, _exchange_until, name, rounds, watchdog_s, folder)


def _well_in(cluster: EmulatedCluster, folder: Path, fn: Callable, *args:
             object) -> list[RankProcess]:
    """Start `fn` on every rank and wait until all have made some exchanges."""
    ranks = cluster.start(fn, *args, group_timeout_s=TIMEOUT_S)
    deadline = time.monotonic() + 60
    while len(list(folder.iterdir())) < len(ranks):
        assert time.monotonic() < deadline, [end.error for end in cluster.collect(ranks, 0.1)]
        time.sleep(0.02)
    return ranks


def _check_errors(ends: Sequence[RankEnd], lost: Sequence[int], at: float) -> list[str]:
    """Every survivor got an error that names it, no later than two time-outs (one for the exchange,
    one for a peer that had just begun) and what a busy machine adds.
    """
    told = []
    for end in ends:
        if end.rank in lost:
            continue
        assert end.ok, end.error
        assert end.value["error"] is not None and 0 < end.value["done"] < ROUNDS, end.value
        assert end.value["ended"] - at < 2 * TIMEOUT_S + 12 and end.value["waited"] < TIMEOUT_S + 12
        assert f"rank {end.rank} of {NODES * PER_NODE} in group" in end.value[
            "error"] and "torch.float32" in end.value["error"]
        told.append(end.value["error"])
    assert len(told) == NODES * PER_NODE - len(lost)
    return told


@pytest.mark.parametrize("name", ["linear", "2dh", "leader"])
def test_a_killed_rank(cluster: Make, name: str, tmp_path: Path) -> None:
    made = cluster(NODES, PER_NODE)
    ranks = _start(made, tmp_path, name)
    os.kill(ranks[3].pid, signal.SIGKILL)
    at = time.monotonic()
    ends = made.collect(ranks, 30)
    assert "ended without an answer" in ends[3].error and ends[3].exit == -signal.SIGKILL
    _check_errors(ends, [3], at)


def test_a_killed_node(cluster: Make, tmp_path: Path) -> None:
    made = cluster(NODES, PER_NODE)
    ranks = _start(made, tmp_path, "2dh")
    for rank in ranks[PER_NODE:2 * PER_NODE]:  # of node 1
        os.kill(rank.pid, signal.SIGKILL)
    at = time.monotonic()
    _check_errors(made.collect(ranks, 30), [2, 3], at)


@pytest.mark.parametrize("fault", ["set_hole", "set_link"])
def test_a_node_that_nobody_hears(cluster: Make, fault: str, tmp_path: Path) -> None:
    """Its ranks are alive and get their error, too."""
    made = cluster(NODES, PER_NODE)
    ranks = _start(made, tmp_path, "2dh")
    getattr(made, fault)(2, fault == "set_hole")
    at = time.monotonic()
    _check_errors(made.collect(ranks, 30), [], at)


def test_a_stopped_rank_and_who_is_missing(cluster: Make, tmp_path: Path) -> None:
    """Stopped for longer than the time-out: the others' errors name it, by the watchdog's signs of
    life.
    """
    made = cluster(NODES, PER_NODE)
    ranks = _start(made, tmp_path, "linear", watchdog_s=0.3)
    os.kill(ranks[4].pid, signal.SIGSTOP)
    at = time.monotonic()
    ends = made.collect(ranks, 2 * TIMEOUT_S + 6)
    assert "no answer within" in ends[4].error
    told = _check_errors(ends, [4], at)
    assert all("watchdog:" in text for text in told)
    assert any("rank 4 silent for" in text for text in told), told


def test_a_short_stop_recovers(cluster: Make, tmp_path: Path) -> None:
    made = cluster(NODES, PER_NODE)
    ranks = _start(made, tmp_path, "leader", 60)
    os.kill(ranks[1].pid, signal.SIGSTOP)
    time.sleep(1.0)
    os.kill(ranks[1].pid, signal.SIGCONT)
    assert [(end.ok, end.value and end.value["done"])
            for end in made.collect(ranks, 60)] == [(True, 60)] * 6


@pytest.mark.parametrize("name", ["linear", "2dh", "leader"])
def test_one_percent_loss_and_a_slow_node_recover(cluster: Make, name: str) -> None:
    """Slower, but every exchange is right."""
    made = cluster(NODES, PER_NODE)
    for node in range(NODES):
        made.set_loss(node, 0.01)
    made.set_rate(1, 20e6)
    values = made.run(_exchange_until, name, 15, 0.0, timeout_s=60, group_timeout_s=30)
    assert [value["done"] for value in values] == [15] * 6 and not any(value["error"]
                                                                       for value in values)
    assert sum(port.drops for port in made.stats()) > 0


def _reform(folder: Path) -> tuple[int, float]:
    """After the death of rank 3 the survivors form a group again, over the store that lives in no
    rank, and go on.
    """
    first = _exchange_until("2dh", ROUNDS, 0.0, folder)
    assert first["error"] is not None
    rank = int(os.environ["RANK"])
    survivors = [r for r in range(NODES * PER_NODE) if r != 3]
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]),
                          is_master=False)
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store),
                            rank=survivors.index(rank), world_size=len(survivors))
    comm = TorchComm(timeout_s=TIMEOUT_S)
    comm.prepare()
    total = algorithms.get("2dh")(comm, torch.full((comm.size,), float(rank)))
    return len(comm.topology.nodes), total.sum().item()


def test_survivors_form_a_group_again(cluster: Make, tmp_path: Path) -> None:
    made = cluster(NODES, PER_NODE)
    ranks = _well_in(made, tmp_path, _reform, tmp_path)
    os.kill(ranks[3].pid, signal.SIGKILL)
    ends = made.collect(ranks, 40)
    assert [(end.value, end.error) for end in ends
            if end.rank != 3] == [((3, 0 + 1 + 2 + 4 + 5.0), None)] * 5
