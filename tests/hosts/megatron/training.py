"""Runs of the training script in a rank of a test, and what they leave behind."""

from __future__ import annotations

import json
from typing import Any

import torch

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
