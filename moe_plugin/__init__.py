"""moe-plugin: Mixture-of-Experts layers for fairseq, Megatron-core and plain PyTorch.

    from moe_plugin import MoEConfig, MoELayer
    layer = MoELayer(MoEConfig(model_dim=512, num_experts=16))
    out = layer(x)              # out.output, out.losses, out.stats

Importing this package imports neither a host nor Triton.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

from moe_plugin import checkout

__version__ = "0.1.0"
checkout.install(Path(__file__).parent)
_EXPORTS = {
    "MoEConfig": "moe_plugin.config", "MoELayer": "moe_plugin.layer",
    "MoEOutput": "moe_plugin.records", "LayerStats": "moe_plugin.records",
    "Routing": "moe_plugin.records", "weighted_loss": "moe_plugin.records",
    "Comm": "moe_plugin.comm", "TorchComm": "moe_plugin.comm", "LocalComm": "moe_plugin.comm",
}
__all__ = [*_EXPORTS, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'moe_plugin' has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def _is_user_dir() -> bool:
    """Whether fairseq imports this package as its `--user-dir`: it notes the folder before."""
    function = getattr(sys.modules.get("fairseq.utils"), "import_user_module", None)
    home = os.path.realpath(os.path.dirname(__file__))
    return any(os.path.realpath(folder) == home for folder in getattr(function, "memo", ()))


# fairseq 0.12 imports the models of a user dir, too; its `moe` branch the package alone
if _is_user_dir():
    importlib.import_module("moe_plugin.models.fairseq_models")
