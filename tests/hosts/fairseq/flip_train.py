"""`fairseq-train` whose last rank computes one wrong bit in every step from STEP on:
`flip_train.py STEP ARGUMENTS...`.
"""

from __future__ import annotations

import os
import sys

import torch
from fairseq_cli.train import cli_main

from moe_plugin.hosts.fairseq import layers
from moe_plugin.hosts.fairseq.trainer import MoETrainer


def spoil(step: int) -> None:
    """The experts of every layer built from now on put out a wrong bit once `step` has begun."""
    original, begun = layers.FairseqMoELayer.__init__, False
    train_step = MoETrainer.train_step

    def train(self: MoETrainer, *args: object) -> object:
        nonlocal begun
        begun = self.get_num_updates() + 1 >= step
        return train_step(self, *args)

    def flipped(module: torch.nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
        if not begun:
            return output
        wrong = output.clone()
        wrong.detach().view(torch.int32).view(-1)[0] ^= 1
        return wrong

    def init(self: layers.FairseqMoELayer, settings: layers.LayerSettings) -> None:
        original(self, settings)
        self.moe.experts.register_forward_hook(flipped)

    layers.FairseqMoELayer.__init__ = init  # type: ignore[method-assign]
    MoETrainer.train_step = train  # type: ignore[method-assign]


if __name__ == "__main__":
    step = int(sys.argv.pop(1))
    if os.environ.get("RANK", "0") == str(int(os.environ.get("WORLD_SIZE", "1")) - 1):
        spoil(step)
    cli_main()
