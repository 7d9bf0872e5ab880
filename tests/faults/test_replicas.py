"""Replicas that come and go, under torchft."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("torchft", reason="needs torchft: pip install 'moe-plugin[elastic]'")

from moe_plugin.training.resilience import elastic
from moe_plugin.training.resilience.elastic import ElasticReplica, ModuleState, check_settings
from tests.distributed import free_port, listens
from tests.faults import host_replicas, recorded, replicas
from tests.faults.meeting import WAIT_S, meet, start_lighthouse, until, until_asked
from tests.faults.replica_hosts import number_of_replica
from tests.preloaded import Server

pytestmark = pytest.mark.distributed
server = Server("tests.faults.preload")
STEPS, LEAVES = 6, 3
WITH_EXPERTS = ["--layers", "1", "--balance", "0"]  # the balance loss is of a rank's own tokens


def _train(lighthouse: str, folder: str) -> list[tuple[int, float, int, bool]]:
    """(step, weight, members, healed) of each step that was made. Replica 1 is lost in step 3 and
    comes back: in one process, so that nothing has to start.
    """
    alone, number = Path(folder, "alone"), number_of_replica()
    weight, done, made = torch.zeros(3), [0], []

    def load(state: dict[str, Any]) -> None:
        weight.copy_(state["weight"])
        done[0] = state["done"]

    def join() -> ElasticReplica:
        return ElasticReplica(lighthouse, number, lambda: {"weight": weight, "done": done[0]}, load,
                              timeout_s=WAIT_S)

    replica, lost = join(), False
    meet(lighthouse, 2)
    while done[0] < STEPS:
        if number == 1 and done[0] == 2 and not lost:
            replica.close()
            lost = True
            weight.fill_(float("nan"))
            until(alone.exists)
            replica = join()
        gradient = torch.full((3,), float(number + 1))
        if replica.average([gradient, None]):
            weight -= gradient
            done[0] += 1
            made.append((done[0], weight[0].item(), replica.members, replica.healed))
        if number == 0 and done[0] == 3:
            alone.touch()
            until_asked(lighthouse)
    replica.close()
    return made


@pytest.fixture
def lighthouse_of() -> Iterator[Callable[..., str]]:
    """Starts one, see `start_lighthouse`; its address."""
    started: list[subprocess.Popen] = []

    def start(**options: int) -> str:
        port = free_port()
        started.append(start_lighthouse(port, **options))
        return f"http://127.0.0.1:{port}"

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_a_replica_leaves_and_comes_back(lighthouse_of: Callable[..., str],
                                         tmp_path: Path) -> None:
    done = server.run(2, _train, lighthouse_of(), str(tmp_path), timeout_s=2 * WAIT_S)
    assert done.code == 0, done.log[-4000:]
    first, second = done.results
    # who takes the other's state has no gradient in that step; 1.5 is the mean of both
    changes = {1: (1.0, 1), 2: (1.5, 2), 3: (1.0, 1), 4: (1.0, 1), 5: (1.5, 2), 6: (1.5, 2)}
    weight, wanted = 0.0, []
    for step, (change, members) in changes.items():
        weight -= change
        wanted.append((step, weight, members, False))
    assert first == wanted
    assert second == [(*made[:3], made[0] in (1, 4)) for made in wanted if made[0] != 3]


def _train_with_experts(lighthouse: str, folder: str, ports: list[int], steps: int) -> None:
    """A rank of a replica of two, which share the experts. Replica 1 leaves after LEAVES steps and
    comes back with other weights.
    """
    number, rank = divmod(int(os.environ["RANK"]), 2)
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
                      MASTER_PORT=str(ports[number]))
    dist.init_process_group("gloo", timeout=timedelta(seconds=WAIT_S))
    script = replicas.train_plain()
    Path(folder, str(number)).mkdir(exist_ok=True)
    alone = Path(folder, "alone")

    class Meeting(recorded.recorded(Path(folder, str(number)), number, rank)):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            if not alone.exists():
                meet(lighthouse, 2)

    class Run(script.Run):
        def log(self, loss: float) -> None:
            super().log(loss)
            if number == 0 and rank == 0 and self.step == LEAVES + 1:
                alone.touch()
                until_asked(lighthouse)  # no rank of this replica goes on before

    elastic.ElasticReplica = Meeting

    def life(seed: int, until: int) -> None:
        run = Run(script.parse([
            f"{folder}/{number}", *WITH_EXPERTS, "--steps", str(until), "--save-every", "10000",
            "--timeout", str(WAIT_S), "--lighthouse", lighthouse, "--replica", str(number),
            "--seed", str(seed)]))
        run.train()
        run.steps.close()

    if number == 1:
        life(2, LEAVES)
        until(alone.exists)
        life(3, steps)
    else:
        life(1, steps)
    dist.barrier()


def test_a_replica_of_several_ranks_heals_its_experts(lighthouse_of: Callable[..., str],
                                                      tmp_path: Path) -> None:
    """Also at the start: torchft alone lets rank 0 keep replica 0's weights, rank 1 replica 1's."""
    done = server.run(4, _train_with_experts, lighthouse_of(), str(tmp_path),
                      [free_port(), free_port()], 10, timeout_s=2 * WAIT_S)
    assert done.code == 0, done.log[-4000:]
    logs = [[json.loads(line) for line in (tmp_path / str(n) / "log.jsonl").open()]
            for n in range(2)]
    # in steps 1 and 5 replica 1 takes the other one's weights; step 4 it does not make
    members = [1, 2, 2, 1, 1, 2, 2, 2, 2, 2]
    assert [line["replicas"] for line in logs[0]] == members
    assert [line["step"] for line in logs[1]] == [1, 2, 3, 5, 6, 7, 8, 9, 10]
    assert [line["step"] for line in logs[1] if line["loss"] is None] == [1, 5]
    assert replicas.difference(tmp_path, 2, 10, WITH_EXPERTS, seeds=[1, 2]) < 1e-5


def test_what_cannot_be_is_named() -> None:
    port = free_port()
    for address in (f"http://127.0.0.1:{port}", "nowhere", "http://127.0.0.1"):
        with pytest.raises(ValueError, match="no lighthouse at .*torchft_lighthouse --bind"):
            ElasticReplica(address, 0, dict, lambda _: None, timeout_s=0.3)
    with pytest.raises(ValueError, match="replica=-1 is out of bounds: .*; number the replicas"):
        ElasticReplica("http://127.0.0.1:1", -1, dict, lambda _: None)
    with pytest.raises(ValueError, match="progress=-1 is out of bounds"):
        ElasticReplica("http://127.0.0.1:1", 0, dict, lambda _: None, progress=-1)


def test_missing_torchft_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchft", None)
    with pytest.raises(ValueError, match=r"pip install 'moe-plugin\[elastic\]'"):
        check_settings(0)


def test_replicas_of_different_models_are_named() -> None:
    ours, other = ModuleState([torch.nn.Linear(2, 2)]), ModuleState([torch.nn.Linear(2, 3)])
    with pytest.raises(ValueError, match="replicas have different models.*\n.*weight"):
        ours.load(other())


def job_of(host: str, folder: Path, request: pytest.FixtureRequest,
           **settings: Any) -> host_replicas.HostJob:
    """A job in processes forked from this host's server."""
    if host == "fairseq":
        from tests.hosts.fairseq.conftest import make_corpus, server

        data = str(make_corpus(request.getfixturevalue("tmp_path_factory").mktemp("corpus")).lm)
    else:
        from tests.hosts.megatron.conftest import make_data
        from tests.hosts.megatron.ranks import server

        data = make_data(request.getfixturevalue("tmp_path_factory").mktemp("data"))
    return host_replicas.HostJob(folder, host=host, data=data, server=server, **settings)


def test_replicas_of_a_job_begin_when_the_lighthouse_listens(tmp_path: Path) -> None:
    found = []

    class Begun(replicas.Job):
        def begin(self) -> None:
            found.append(listens(int(self.lighthouse.rsplit(":", 1)[1])))

    with Begun(tmp_path, 1):
        assert found == [True]


def _needs(host: str) -> None:
    names = ["megatron", "megatron.training"] if host == "megatron" else [host]
    # a name below a package that is not there cannot be asked for
    if any(importlib.util.find_spec(name) is None for name in names):
        pytest.skip(f"needs {' and '.join(names)}")


@pytest.mark.parametrize("host", ["fairseq", "megatron"])
def test_a_host_s_replica_is_killed_and_comes_back(host: str, tmp_path: Path,
                                                   request: pytest.FixtureRequest) -> None:
    _needs(host)
    # Nobody makes the step in which one takes the other's state for the first time. The fifth
    # gradient of replica 1 is in the other one's step, but it takes that step for lost.
    job = job_of(host, tmp_path / "job", request, steps=60, replicas=2, fails={
        0: {"healing": True, "awaits": 1}, 1: {"healing": True, "after": 0, "attempts": [5]}})
    [killed], worst = host_replicas.run(job, 1, 0)
    assert killed.lost <= 1 and killed.back > killed.at
    assert worst < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("host", ["plain", "fairseq", "megatron"])
def test_twenty_kills_and_returns(host: str, tmp_path: Path,
                                  request: pytest.FixtureRequest) -> None:
    if host != "plain":
        _needs(host)
    made, worst, seed = [], 0.0, 0
    while len(made) < 20:
        folder, wanted = tmp_path / str(seed), 20 - len(made)
        more, other = (replicas.run(folder, wanted, 500, seed) if host == "plain" else
                       host_replicas.run(job_of(host, folder, request, steps=400), wanted, seed))
        made, worst, seed = [*made, *more], max(worst, other), seed + 1
    assert worst < 1e-4
    assert max(killed.lost for killed in made) <= 1
