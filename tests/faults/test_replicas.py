"""Replicas that come and go, under torchft."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("torchft", reason="needs torchft: pip install 'moe-plugin[elastic]'")

from moe_plugin.hosts.plain.elastic import ElasticReplica
from tests.distributed import free_port
from tests.faults import replicas
from tests.preloaded import Server

pytestmark = pytest.mark.distributed
_server = Server("tests.faults.preload")
STEPS = 6


def _train(lighthouse: str) -> list[tuple[int, float, int, bool]]:
    """(step, weight, members, healed) of each step that was made. Replica 1 is lost in step 3 and
    comes back: in one process, so that nothing has to start.
    """
    number = int(os.environ["RANK"])
    for name in ("RANK", "WORLD_SIZE"):
        del os.environ[name]
    weight, done, made = torch.zeros(3), [0], []

    def load(state: dict[str, Any]) -> None:
        weight.copy_(state["weight"])
        done[0] = state["done"]

    def join() -> ElasticReplica:
        return ElasticReplica(lighthouse, number, lambda: {"weight": weight, "done": done[0]}, load,
                              timeout_s=20)

    replica, lost = join(), False
    while done[0] < STEPS:
        if number == 1 and done[0] == 2 and not lost:
            replica.close()
            replica, lost = None, True
            weight.fill_(float("nan"))
            time.sleep(4)
            replica = join()
        gradient = torch.full((3,), float(number + 1))
        if replica.average([gradient, None]):
            weight -= gradient
            done[0] += 1
            made.append((done[0], weight[0].item(), replica.members, replica.healed))
        if number == 0 and replica.members == 1:
            time.sleep(2)  # the lost one comes back meanwhile
    replica.close()
    return made


def test_a_replica_leaves_and_comes_back() -> None:
    port = free_port()
    program = Path(sys.executable).with_name("torchft_lighthouse")
    lighthouse = subprocess.Popen([
        str(program), "--bind", f"127.0.0.1:{port}", "--min_replicas", "1", "--join_timeout_ms",
        "1500", "--heartbeat_timeout_ms", "1500"], stderr=subprocess.DEVNULL)
    try:
        done = _server.run(2, _train, f"http://127.0.0.1:{port}", timeout_s=60)
    finally:
        lighthouse.kill()
        lighthouse.wait()
    assert done.code == 0, done.log[-4000:]
    first, second = done.results
    weight, together = 0.0, 0
    # 1.5 is the mean of both gradients; where it took the other's state, the other's alone counts
    for step, found, members, healed in first:
        alone = members == 1
        weight -= 1.5 if not alone else 2.0 if healed else 1.0
        together += not alone
        assert found == pytest.approx(weight), (first, second)
        assert step in range(1, STEPS + 1)
    assert 0 < together < STEPS and [step for step, *_ in first] == list(range(1, STEPS + 1))
    assert any(healed for *_, healed in second) and second[-1][1] == first[-1][1]


def test_what_cannot_be_is_named() -> None:
    port = free_port()
    for address in (f"http://127.0.0.1:{port}", "nowhere", "http://127.0.0.1"):
        with pytest.raises(ValueError, match="no lighthouse at .*torchft_lighthouse --bind"):
            ElasticReplica(address, 0, dict, lambda _: None, timeout_s=0.3)


@pytest.mark.slow
def test_twenty_kills_and_returns(tmp_path: Path) -> None:
    made, worst, seed = [], 0.0, 0
    while len(made) < 20:
        more, other = replicas.run(tmp_path / str(seed), 20 - len(made), 500, seed)
        made, worst, seed = [*made, *more], max(worst, other), seed + 1
    assert worst < 1e-4
    assert max(killed.lost for killed in made) <= 1
