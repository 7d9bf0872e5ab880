"""The hosts' own training commands as ranks of an emulated cluster: real entry points, started with
env://.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_plugin.comm import TorchComm
from scripts.emulate import EmulatedCluster, RankProcess

ALL = "[0, 1, 2, 3]"
ONE_NODE, TWO_BY_TWO = "1 node(s) of 4 rank(s) (detected)", "2 node(s) of 2 rank(s) (detected)"
MEASURED = ("linear", "native", "2dh", "leader")
ANNOUNCED = re.compile(r"all-to-all (\S+) over ranks (\[[\d, ]+\]): (.*)")


@dataclass(frozen=True)
class Job:
    """What a run left.

    losses: by step, as the host wrote them. exchanges: all-to-alls of the forward passes of all
    layers by the algorithm that really ran. topologies: by group, what the run says of it
    (`2 node(s) of 2 rank(s) (detected)`, and why an algorithm is not used).
    """

    losses: dict[int, float]
    exchanges: dict[str, int]
    topologies: dict[str, str]
    log: str


def as_program(argv: Sequence[str], log: str) -> None:
    """Become the program that these arguments start; all it prints goes to `log`."""
    sys.argv = list(argv)
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    # loaded by an earlier test, it has read its environment; its compiler's threads do not survive
    # a fork
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].config.disable = True
    stream = open(log, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 - until the process ends
    sys.stdout = sys.stderr = stream
    logging.basicConfig(level=logging.INFO, format="%(levelname)s | %(name)s | %(message)s",
                        stream=stream, force=True)


def fairseq(argv: Sequence[str], log: str) -> None:
    """`fairseq-train ARGV` on this rank."""
    from fairseq_cli import train

    as_program(["fairseq-train", *argv], f"{log}{os.environ['RANK']}")
    train.cli_main()


_INHERITED: list[object] = []


def megatron(argv: Sequence[str], log: str) -> None:
    """`python -m moe_plugin.hosts.megatron.train ARGV` on this rank."""
    from megatron.core import parallel_state

    from moe_plugin.hosts.megatron import train
    from moe_plugin.hosts.megatron.compat import aux_losses

    # groups that a test made in the process that this one is forked from must not end here:
    # that would wait for threads which a fork does not have
    _INHERITED.append((dict(vars(parallel_state)), aux_losses.logged_losses()))
    aux_losses.forget_losses()

    sys.modules.pop("moe_plugin.hosts.megatron.spec", None)  # it follows the arguments
    as_program(["train", *argv], f"{log}{os.environ['RANK']}")
    status = train.main(argv)
    if status:  # with what it said last
        said = Path(f"{log}{os.environ['RANK']}").read_text(encoding="utf-8").splitlines()
        raise SystemExit(f"{status}: {said[-1] if said else ''}")


def die_in_exchange(victim: int, at: int, run: Any, *args: Any) -> None:
    """`run(*args)`; rank `victim` is killed, without a word, when it begins its `at`-th exchange of
    messages.
    """
    exchange = TorchComm.send_receive

    def counted(self: TorchComm, *tensors: Any) -> None:
        if counted.calls == at:
            os.kill(os.getpid(), signal.SIGKILL)
        counted.calls += 1
        exchange(self, *tensors)

    counted.calls = 0
    if int(os.environ["RANK"]) == victim:
        TorchComm.send_receive = counted  # in this forked rank alone
    run(*args)


def start(cluster: EmulatedCluster, run: Any, *args: Any) -> list[RankProcess]:
    """Start `run(*args)` on every rank; it joins the world itself."""
    return cluster.start(run, *args, join=False)


def finish(cluster: EmulatedCluster, run: Any, *args: Any, timeout_s: float = 180.0) -> None:
    """The same, to a good end; else a rank's trace and log are raised."""
    ends = cluster.collect(start(cluster, run, *args), timeout_s)
    failed = [end.error for end in ends if not end.ok]
    assert not failed, "\n".join(failed) + Path(f"{args[-1]}0").read_text()[-4000:]


def read(folder: Path, losses: dict[int, float]) -> Job:
    """What a run left in its folder: `log0` (rank 0) and `stats.jsonl`."""
    log = "".join(path.read_text() for path in sorted(folder.glob("log?")))
    exchanges: dict[str, int] = {}
    for line in (folder / "stats.jsonl").read_text().splitlines():
        for name, count in json.loads(line)["exchanges"].items():
            exchanges[name] = exchanges.get(name, 0) + count
    return Job(losses, exchanges, {ranks: said for _, ranks, said in ANNOUNCED.findall(log)}, log)


def fairseq_losses(log: str) -> dict[int, float]:
    """Loss by step, three decimals: what fairseq prints."""
    found = [
        json.loads(entry) for entry in re.findall(r"train_inner(?: \||\]\[INFO\] -) (\{.*\})", log)
    ]
    return {int(entry["num_updates"]): float(entry["loss"]) for entry in found}


def megatron_losses(path: Path) -> dict[int, float]:
    """Loss by step, every digit; of a step that ran twice the last one. A line that is being
    written is left out.
    """
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return {record["iteration"]: record["lm_loss"] for record in map(json.loads, lines)}


def same_parameters(one: Path, other: Path, world: int, atol: float = 0.0) -> None:
    """The fairseq checkpoints of two runs hold the same parameters on every rank; to the last bit
    unless `atol` is given.
    """
    for rank in range(world):
        first, second = (torch.load(folder / f"checkpoint_last-rank-{rank}.pt",
                                    weights_only=False)["model"] for folder in (one, other))
        # fairseq's `_float_tensor` is uninitialized memory: it only carries a dtype
        names = [
            name for name in first
            if torch.is_tensor(first[name]) and not name.endswith("._float_tensor")
        ]
        assert first.keys() == second.keys() and len(names) > 20
        assert not [
            name
            for name in names if not torch.allclose(first[name], second[name], rtol=0, atol=atol)
        ], rank


def algorithms(slow: Sequence[str]) -> list[Any]:
    """A test's parameters: every all-to-all; these are slow."""
    return [pytest.param(name, marks=[pytest.mark.slow] if name in slow else [])
            for name in (*MEASURED, "auto")]


def ran_on_two_nodes(job: Job, name: str, steps: int, layers: int) -> None:
    """The run says that it is on two nodes of two ranks, and `name` carried every exchange."""
    assert job.topologies == {ALL: TWO_BY_TWO}
    every = steps * layers * 2  # rows there and rows back
    if name == "auto":  # its first calls measure all of them
        assert set(job.exchanges) == set(MEASURED) and sum(job.exchanges.values()) == every
    else:
        assert job.exchanges == {name: every}


def settled_on_a_layout(folder: Path, layers: int) -> None:
    """`stats.jsonl` of a run with `--moe-parallel auto`: every layer tried several layouts and
    settled on one of them.
    """
    rows = [json.loads(line) for line in (folder / "stats.jsonl").read_text().splitlines()]
    names = {row["layer"] for row in rows}
    assert len(names) == layers
    for name in names:
        mine = [row for row in rows if row["layer"] == name]
        settled = [d["choice"] for row in mine for d in row["decisions"] if d["event"] == "settle"]
        ran = {layout for row in mine for layout in row["layouts"]}
        assert settled and len(ran) > 1 and set(settled) <= ran, (name, settled, ran)


@dataclass(frozen=True)
class Group:
    """One rank's expert-parallel group: its ranks in the world, their nodes (indices in the group),
    all-to-alls that ran, losses.
    """

    ranks: tuple[int, ...]
    nodes: tuple[tuple[int, ...], ...]
    exchanges: dict[str, int]
    losses: dict[int, float]


def megatron_group(argv: Sequence[str], log: str) -> Group:
    """Train, and look into the first MoE layer on this rank."""
    from tests.hosts.megatron.training import ran

    as_program(["train", *argv], f"{log}{os.environ['RANK']}")
    run = ran([word for word in argv if word != "--cpu"])
    comm = run.moe_layers()[0].moe.comm
    losses = {record["iteration"]: record["lm_loss"] for record in run.steps_logged}
    return Group(tuple(comm.ranks), comm.topology.nodes, dict(comm.counters.exchanges), losses)
