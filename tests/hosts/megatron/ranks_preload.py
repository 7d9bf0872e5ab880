"""Imported once by the fork server of `ranks`, before it forks any rank."""

import importlib.util
import os
import warnings

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # Megatron compiles small functions: 15 s for the first
warnings.filterwarnings("ignore")

if importlib.util.find_spec("megatron") is not None and importlib.util.find_spec(
        "megatron.core") is not None:
    from moe_plugin.hosts.megatron import cpu

    cpu.enable()
