"""moe-plugin: Mixture-of-Experts layers for fairseq, Megatron-core and plain PyTorch.

    from moe_plugin import MoELayer, replace_ffn
    layer = MoELayer(512, num_experts=16)
    out = layer(x)              # out.output, out.losses, out.stats
    replace_ffn(model, num_experts=8, every=2)      # in any PyTorch model

Importing moe-plugin imports neither a host framework nor Triton.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_plugin.utils import checkout

if TYPE_CHECKING:  # what type checkers see; the names are those of EXPORTS
    from moe_plugin.comm import Comm as Comm
    from moe_plugin.comm import LocalComm as LocalComm
    from moe_plugin.comm import TorchComm as TorchComm
    from moe_plugin.config import MoEConfig as MoEConfig
    from moe_plugin.config import from_dict as from_dict
    from moe_plugin.config import from_yaml as from_yaml
    from moe_plugin.hosts.plain.blocks import MoEBlock as MoEBlock
    from moe_plugin.hosts.plain.blocks import auxiliary_loss as auxiliary_loss
    from moe_plugin.hosts.plain.blocks import optimizer_groups as optimizer_groups
    from moe_plugin.hosts.plain.replace import replace_ffn as replace_ffn
    from moe_plugin.hosts.plain.sharding import ddp_model as ddp_model
    from moe_plugin.hosts.plain.sharding import fully_shard_model as fully_shard_model
    from moe_plugin.layer import MoELayer as MoELayer
    from moe_plugin.output import LayerStats as LayerStats
    from moe_plugin.output import MoEOutput as MoEOutput
    from moe_plugin.output import weighted_loss as weighted_loss
    from moe_plugin.records import Routing as Routing
    from moe_plugin.routing import finish_step as finish_step
    from moe_plugin.training.gradients.sync import clip_grad_norm_ as clip_grad_norm_

__version__ = "0.2.0"
checkout.install(Path(__file__).parent)
EXPORTS = {
    "MoEConfig": "moe_plugin.config", "MoELayer": "moe_plugin.layer",
    "MoEOutput": "moe_plugin.output", "LayerStats": "moe_plugin.output",
    "Routing": "moe_plugin.records", "weighted_loss": "moe_plugin.output",
    "replace_ffn": "moe_plugin.hosts.plain.replace", "MoEBlock": "moe_plugin.hosts.plain.blocks",
    "auxiliary_loss": "moe_plugin.hosts.plain.blocks",
    "optimizer_groups": "moe_plugin.hosts.plain.blocks",
    "ddp_model": "moe_plugin.hosts.plain.sharding",
    "fully_shard_model": "moe_plugin.hosts.plain.sharding",
    "clip_grad_norm_": "moe_plugin.training.gradients.sync", "finish_step": "moe_plugin.routing",
    "from_yaml": "moe_plugin.config", "from_dict": "moe_plugin.config",
    "Comm": "moe_plugin.comm", "TorchComm": "moe_plugin.comm", "LocalComm": "moe_plugin.comm",
}
__all__ = [*EXPORTS, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in EXPORTS:
        raise AttributeError(f"module 'moe_plugin' has no attribute {name!r}")
    return getattr(importlib.import_module(EXPORTS[name]), name)


def _is_user_dir() -> bool:
    """True if fairseq imports this package as its `--user-dir`. fairseq stores the path of the user
    directory before it imports the package.
    """
    function = getattr(sys.modules.get("fairseq.utils"), "import_user_module", None)
    home = os.path.realpath(os.path.dirname(__file__))
    return any(os.path.realpath(folder) == home for folder in getattr(function, "memo", ()))


if _is_user_dir():
    importlib.import_module("moe_plugin.hosts.fairseq.register")
