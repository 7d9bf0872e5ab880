"""Runs on Megatron's own loop, in a rank of a test or by command, and what they leave behind."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.hosts.megatron.ranks import ROOT, run_main, server

VERSION = tuple(int(part) for part in importlib.metadata.version("megatron-core").split(".")[:2])
own_loop = pytest.mark.skipif(
    importlib.util.find_spec("megatron.training") is None,
    reason="needs megatron.training, which megatron-core 0.17 and newer hold: "
    "bash scripts/test_megatron_versions.sh 0.19.2")
TRAIN = "moe_plugin.hosts.megatron.train"
SCRIPT = str(Path(ROOT, "moe_plugin", "hosts", "megatron", "examples", "pretrain_gpt_moe.py"))
QUICK = ["--num-workers", "0"]  # no processes that read data

MODEL = [
    "--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "32",
    "--micro-batch-size", "2", "--global-batch-size", "8", "--lr", "3e-3", "--num-experts", "4",
    "--moe-ffn-hidden-size", "48", "--disable-bias-linear", "--moe-aux-loss-coeff", "0.01",
    "--moe-z-loss-coeff", "0.001", "--moe-router-dtype", "fp32", "--log-interval", "1",
    "--hidden-dropout", "0", "--attention-dropout", "0", "--lr-decay-iters", "8"
]
EP2 = ["--expert-model-parallel-size", "2"]
TP2 = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
PP2 = ["--pipeline-model-parallel-size", "2"]
RECOMPUTE = ["--recompute-granularity", "full", "--recompute-method", "uniform",
             "--recompute-num-layers", "1"]


def argv_for(data: str, steps: int | str, *more: str) -> list[str]:
    """Arguments that train the model with this data up to a step."""
    return [*MODEL, "--data-path", data, "--train-iters", str(steps), *more]


def launched(argv: list[str], world: int, cwd: Path, fails: bool = False,
             model: Sequence[str] = MODEL) -> str:
    """Train by our command, with a model and these; what ranks printed."""
    return run_main(TRAIN, ["--cpu", *QUICK, *model, *argv], world, cwd, fails=fails)


@dataclass
class Run:
    """A run on Megatron's own loop in this process.

    Attributes:
        records: what it logged, also rounds of validation. chunks: of the model, wrapped.
        steps: made in this process.
    """

    records: list[dict[str, Any]] = field(default_factory=list)
    chunks: list[Any] = field(default_factory=list)
    optimizer: Any = None
    scheduler: Any = None
    features: Any = None
    steps: int = 0

    @property
    def model(self) -> torch.nn.Module:
        """The first chunk, without wrappers."""
        from moe_plugin.hosts.megatron.compat.core import bare

        return bare(self.chunks[0])

    def moe_layers(self) -> list[Any]:
        """Our layers on this rank."""
        return [m for chunk in self.chunks for m in chunk.modules()
                if type(m).__name__ == "PluginMoELayer"]

    def feature(self, kind: type) -> Any:
        """The run's feature of this kind; None: there is none."""
        return self.features.find(kind)

    @property
    def steps_logged(self) -> list[dict[str, Any]]:
        """Records without those of validations."""
        return [record for record in self.records if "lm_loss" in record]


def ran(argv: list[str], built: Callable[[Run], None] = lambda run: None,
        stepped: Callable[[Run], None] = lambda run: None, run: Run | None = None) -> Run:
    """Train with these arguments on Megatron's own loop, in this process, once in its life.

    Args:
        built: called when the model is there. stepped: after each step.
        run: takes what is seen, also where the run ends by an error.
    """
    from moe_plugin.hosts.megatron import launch, script, script_report

    found = Run() if run is None else run
    connect, around_step, write = (script.Script.connect, script.Script.around_step,
                                   script_report.RunLog.write)

    def connected(self: Any, *parts: Any) -> None:
        connect(self, *parts)
        found.chunks, found.optimizer, found.scheduler = parts
        found.features = self.run
        built(found)

    def step(self: Any, *given: Any) -> Any:
        done = around_step(self, *given)
        found.steps += 1
        stepped(found)
        return done

    def written(self: Any, record: dict[str, Any]) -> None:
        found.records.append(record)
        write(self, record)

    sys.modules.pop("moe_plugin.hosts.megatron.spec", None)  # it follows the arguments
    with mock.patch.multiple(script.Script, connect=connected, around_step=step), \
            mock.patch.object(script_report.RunLog, "write", written):
        try:
            launch.run(SCRIPT, [*QUICK, *argv], on_cpu=True)
        except SystemExit as end:  # so Megatron ends at --exit-interval
            if end.code or not found.steps:
                raise
    return found


def trained(argv: list[str]) -> dict[str, Any]:
    """Train with these arguments; the last record."""
    return ran(argv).records[-1]


def refusal(argv: list[str]) -> str:
    """What a user reads of training with these arguments that does not begin; empty if it trains.
    """
    from moe_plugin.hosts.megatron.launch import of_a_script

    try:
        ran(argv)
    except Exception as error:
        said = of_a_script(error)
        if said is None:
            raise
        return said
    return ""


class _Enough(Exception):
    """The run goes no further."""


def when_built(argv: list[str], work: Callable[[Run], Any]) -> Any:
    """What `work` gives of a run whose model is built and loaded; it trains no step."""
    given = list[Any]()

    def built(run: Run) -> None:
        given.append(work(run))
        raise _Enough

    try:
        ran(argv, built)
    except _Enough:
        return given[0]


def arguments_of(argv: list[str]) -> argparse.Namespace:
    """Megatron's arguments of a run of one process with these, not checked; parsed in a rank."""
    done = server.run(1, _plain_arguments, argv)
    assert done.code == 0, done.log[-4000:]
    return argparse.Namespace(**done.results[0])


def _plain_arguments(argv: list[str]) -> dict[str, Any]:
    return {name: value for name, value in vars(parsed(argv)).items()
            if isinstance(value, (bool, int, float, str, list, type(None)))}


def options() -> list[str]:
    """What Megatron's parser takes, as "--name"; read in a rank."""
    done = server.run(1, _option_strings)
    assert done.code == 0, done.log[-4000:]
    return done.results[0]


def _option_strings() -> list[str]:
    return [name for action in _parser()._actions for name in action.option_strings]


def parsed(argv: list[str]) -> argparse.Namespace:
    """The same in this process, a rank."""
    return _parser().parse_args(argv)


def _parser() -> argparse.ArgumentParser:
    from moe_plugin.hosts.megatron import launch
    from moe_plugin.hosts.megatron.compat.settings import training_module
    from moe_plugin.hosts.megatron.examples import pretrain_gpt_moe

    parser = argparse.ArgumentParser("pretrain_gpt_moe.py", allow_abbrev=False)
    parser = training_module("arguments").add_megatron_arguments(parser)
    return launch.chained(pretrain_gpt_moe.own_defaults)(parser)


def records_of(world: int, argv: list[str], log: Path) -> list[dict[str, Any]]:
    """What a run with these arguments logs, without times; log: a file that is not there."""
    run_main(TRAIN, ["--cpu", *QUICK, *argv, "--log-file", str(log)], world, log.parent)
    return [{name: value for name, value in json.loads(line).items()
             if name not in ("seconds", "tokens_per_s")} for line in log.read_text().splitlines()]


def losses_of(path: str) -> dict[int, float]:
    """Loss by iteration of a log."""
    with open(path, encoding="utf-8") as stream:
        records = map(json.loads, stream)
        return {one["iteration"]: one["lm_loss"] for one in records if "lm_loss" in one}


def logits(argv: list[str], root: str, tokens_BT: torch.Tensor) -> torch.Tensor:
    """[B, T, V] of the model of these arguments with the checkpoint under `root`."""
    length = tokens_BT.shape[1]
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)

    def forward(run: Run) -> torch.Tensor:
        with torch.no_grad():
            return run.model.eval()(tokens_BT, torch.arange(length).expand_as(tokens_BT), mask)

    return when_built([*argv, "--load", root], forward)
