"""Imported once by the server that forks plain PyTorch's ranks (tests/preloaded.py)."""

import importlib
import os

os.environ["TORCHDYNAMO_DISABLE"] = "1"
for name in ("torch._dynamo", "moe_plugin.checkpoint", "scripts.emulate.faults",
             "moe_plugin.hosts.plain.sharding", "moe_plugin.training.gradients.sync",
             "moe_plugin.training.resilience.elastic"):
    importlib.import_module(name)
