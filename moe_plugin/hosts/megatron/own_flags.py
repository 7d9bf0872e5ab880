"""Flags of the launcher that are not settings."""

from __future__ import annotations

from typing import Any

Flag = tuple[str, dict[str, Any]]

FUSED_ADAM: Flag = ("moe-fused-adam", {
    "action": "store_true", "help": "Adam by torch's fused kernels, on CPU and GPU, where Megatron "
    "uses torch's Adam (without Apex and Transformer Engine); equal up to rounding"
})
LOG_FILE: Flag = ("log-file", {
    "help": "JSONL file, one object a logged iteration; default: log.jsonl in --save"})
STAGE_LAYOUTS: Flag = ("stage-layouts", {
    "nargs": "+", "metavar": "tp=N,ep=N",
    "help": "pipeline stages of unequal layout, one entry a stage"})
NATIVE_MOE: Flag = ("native-moe", {
    "action": "store_true", "help": "--spec moe_plugin.hosts.megatron.spec gives Megatron's own "
    "MoE layer, for comparison"})
TRUST: Flag = ("trust-checkpoint", {
    "action": "store_true", "help": "load also checkpoints whose files could run code"})
ALL = FUSED_ADAM, LOG_FILE, STAGE_LAYOUTS, NATIVE_MOE, TRUST
