"""Run next to `branch_tree`: a command line of the branch with our user dir, and a layer of it.

Arguments: `finder` or `alone` (whether the startup finder is installed), the user dir. Prints one
JSON object on the last line.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import logging
import sys
from argparse import Namespace
from pathlib import Path

STARTUP = Path(__file__).parents[3] / "moe_plugin/hosts/fairseq/compat/startup.py"
LANGUAGE_MODEL = ("--task language_modeling --arch transformer_lm_gpt --moe-expert-count 4 "
                  "--moe-capacity-factor none --moe-router-second-expert all "
                  "--moe-batch-prioritized")


def start(finder: bool) -> None:
    """As Python starts with our `.pth` file, or without it."""
    name = "moe_plugin_fairseq_compat"
    sys.meta_path[:] = [f for f in sys.meta_path if type(f).__module__ != name]
    spec = importlib.util.spec_from_file_location(name, STARTUP)
    startup = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(startup)
    if finder:
        startup.boot()
    else:  # Python <= 3.10 needs no help to import fairseq
        dataclasses.dataclass = startup.hashable_fairseq_dataclasses(dataclasses.dataclass)
    assert "moe_plugin" not in sys.modules


def parsed(user_dir: str, command: str) -> Namespace:
    """A command line as the branch's `fairseq-train` reads it."""
    from fairseq import options

    return options.parse_args_and_arch(options.get_training_parser(),
                                       ["data", "--user-dir", user_dir, *command.split()])


def main() -> None:
    """See the module."""
    start(sys.argv[1] == "finder")
    import torch
    from torch import nn

    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("moe_plugin").setLevel(logging.INFO)
    logging.getLogger("moe_plugin").addHandler(handler)
    args = parsed(sys.argv[2], LANGUAGE_MODEL)
    translation = parsed(sys.argv[2], "--arch transformer --moe-top-k 1")
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf
    from fairseq.modules import transformer_layer

    settings = convert_namespace_to_omegaconf(args).model

    torch.manual_seed(0)
    gate = nn.Module()
    gate.wg = nn.Linear(8, 4, bias=False)
    experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
    layer = transformer_layer.MOELayer(gate, experts, settings)
    x_BTD = torch.randn(2, 5, 8)
    y_BTD, loss = layer(x_BTD)
    scores = torch.softmax(gate.wg(x_BTD), -1)
    top, ids = scores.topk(2, -1)
    each = torch.stack([expert(x_BTD) for expert in experts], -2)
    wanted = (each.gather(-2, ids[..., None].expand(*ids.shape, 8)) *
              (top / top.sum(-1, keepdim=True))[..., None]).sum(-2)
    config = layer.layer.config
    print(json.dumps({
        "capacity": config.dispatch.capacity_factor, "prioritized": config.router.batch_prioritized,
        "flag": settings.moe_capacity_factor, "translation": translation.moe_top_k,
        "error": float((y_BTD - wanted).detach().abs().max()),
        "loss": sorted(loss) if isinstance(loss, dict) else "tensor", "log": messages,
        "stock": "moe_plugin.hosts.fairseq.registered" in sys.modules
    }))


if __name__ == "__main__":
    main()
