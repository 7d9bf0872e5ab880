"""Flags of our training script and of the launcher that are no settings: they are the same in both.
"""

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
