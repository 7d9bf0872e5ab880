"""Runs of the training script, or of Megatron's own loop, in a rank of a test, and what they leave
behind.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.hosts.megatron.ranks import ROOT, run_main

HAS_TRAINING = (importlib.util.find_spec("megatron") is not None
                and importlib.util.find_spec("megatron.training") is not None)
own_loop = pytest.mark.skipif(
    not HAS_TRAINING, reason="needs megatron.training, which megatron-core 0.17 and newer hold: "
    "bash scripts/test_megatron_versions.sh 0.19.2")
# what a test of both loops is parametrized with: ours, and Megatron's by the launcher
LOOPS = ["ours", pytest.param("megatron", marks=[pytest.mark.slow, own_loop])]
SCRIPT = str(Path(ROOT, "scripts", "pretrain_gpt_moe.py"))
AS_SCRIPT = """--max-position-embeddings 32 --vocab-size 512 --num-workers 0 --attention-backend
unfused --use-cpu-initialization --dist-ckpt-optim-fully-reshardable --split 100,0,0
--eval-iters 0""".split()

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
# the same model on Megatron's own loop
OWN = [*MODEL, "--max-position-embeddings", "32", "--vocab-size", "257", "--num-workers", "0",
       "--eval-iters", "0", "--save-interval", "100"]


def launched(argv: list[str], world: int, cwd: Path, fails: bool = False) -> str:
    """Train on Megatron's own loop by our launcher, with `OWN` and these; what ranks printed."""
    return run_main("moe_plugin.hosts.megatron.launch", ["--moe-cpu", SCRIPT, *OWN, *argv], world,
                    cwd, fails=fails)


def trained(argv: list[str]) -> dict[str, Any]:
    """Train with these arguments; the last record."""
    from moe_plugin.hosts.megatron.trainer import arguments
    from moe_plugin.hosts.megatron.trainer import train as script

    args = arguments.parser().parse_args(argv)
    script.start(args)
    return script.run(args)


def refusal(argv: list[str]) -> str:
    """What training with these arguments refuses; empty if it trains."""
    try:
        trained(argv)
    except ValueError as error:
        return str(error)
    return ""


def command_of(loop: str, argv: list[str]) -> tuple[str, list[str]]:
    """Module and arguments of a command that trains."""
    if loop == "ours":
        return "moe_plugin.hosts.megatron.train", argv
    return "moe_plugin.hosts.megatron.launch", ["--moe-cpu", "--moe-verbose", SCRIPT, *AS_SCRIPT,
                                                *argv]


def records_of(loop: str, world: int, argv: list[str], log: Path) -> list[dict[str, Any]]:
    """What a run with these arguments logs, without times; log: a file that is not there."""
    run_main(*command_of(loop, [*argv, "--log-file", str(log)]), world, log.parent)
    return [{name: value for name, value in json.loads(line).items()
             if name not in ("seconds", "tokens_per_s")} for line in log.read_text().splitlines()]


def losses_of(path: str) -> dict[int, float]:
    """Loss by iteration of a log."""
    with open(path, encoding="utf-8") as stream:
        return {record["iteration"]: record["lm_loss"] for record in map(json.loads, stream)}


def logits(argv: list[str], root: str, tokens_BT: torch.Tensor) -> torch.Tensor:
    """[B, T, V] of the model of these arguments with the checkpoint under `root`."""
    from moe_plugin.hosts.megatron.trainer import arguments, checkpoint, model
    from moe_plugin.hosts.megatron.trainer import train as script

    args = arguments.parser().parse_args(argv)
    script.start(args)
    training = model.build(args, arguments.transformer_config(args, cpu=True),
                           arguments.our_settings(args), 257)
    checkpoint.load(root, training)
    length = tokens_BT.shape[1]
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    positions = torch.arange(length).expand_as(tokens_BT)
    with torch.no_grad():
        return training.bare()[0].eval()(tokens_BT, positions, mask)
