"""`fairseq-train` that prints, at the end of each step and for each rank, its real tokens and what
the first MoE layer's router has counted: `uneven_train.py ARGUMENTS...`.
"""

from __future__ import annotations

import json
import os
from typing import Any

import torch
from fairseq_cli.train import cli_main

from moe_plugin.hosts.fairseq.layers import moe_layers
from moe_plugin.hosts.fairseq.trainer import MoETrainer
from moe_plugin.routing.contract import RouterSteps


def tell() -> None:
    """Print them from now on."""
    step, after = MoETrainer.train_step, RouterSteps.after_step
    tokens = 0

    def train_step(self: MoETrainer, samples: list[Any], *args: Any) -> Any:
        nonlocal tokens
        tokens = sum(int(sample["ntokens"]) for sample in samples if sample)
        return step(self, samples, *args)

    def after_step(self: RouterSteps, facts: Any) -> None:
        router = moe_layers(self.models[0])[0].moe_layer.moe.router
        sums, before_E = [each.tolist() for each in router.step_sums()], router.bias_E.clone()
        told = {"step": facts.number, "tokens": tokens, "sums": sums,
                "step_load": router.step_load_E.tolist()}
        after(self, facts)
        told["moved"] = (router.bias_E - before_E).tolist()
        os.write(1, f"ROUTER {json.dumps(told)}\n".encode())

    MoETrainer.train_step, RouterSteps.after_step = train_step, after_step


if __name__ == "__main__":
    torch.set_num_threads(1)
    tell()
    cli_main()
