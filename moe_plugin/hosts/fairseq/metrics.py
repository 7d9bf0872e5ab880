"""The MoE metrics in fairseq's log lines, with the same names as in fairseq's `moe` branch."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from moe_plugin.hosts.fairseq.groups import MeasuredComm
from moe_plugin.output import LayerStats

SHARE = 0.2  # share of experts that counts as the most used, and as the least used
METRICS = ("overflow_expert1", "overflow_expert2", "entropy_gating", "expert1_balance_top",
           "expert1_balance_bottom", "unused_expert1_count", "expert2_balance_top",
           "expert2_balance_bottom", "unused_expert2_count", "all_to_all_cpu_time_ms",
           "all_to_all_cuda_time_ms",
           )


def layer_metrics(layers: list[Any]) -> dict[str, Any]:
    """Return the metrics of one batch, averaged over all MoE layers. The metrics are tensors on the
    device of the layers.

    This function synchronizes with the device only if all-to-all times are measured.

    `overflow_expert1` and `overflow_expert2` are the percentages of first and second choices that
    were dropped. The unit of `entropy_gating` is nats. `expert1_balance_top` is the percentage of
    tokens that are sent to the most used 20 % of the experts. `expert1_balance_bottom` is the
    percentage of tokens that are sent to the least used 20 % of the experts. `unused_expert1_count`
    is the number of experts that no token chose. The metrics of `expert2` are defined in the same
    way for second choices. As in fairseq's branch, the metrics of balance and unused experts
    include second choices that `--moe-second-expert-policy random` rejected.
    """
    seen = [stats_metrics(layer.stats) for layer in layers if layer.stats is not None]
    # sorted, because fairseq sums these values over ranks by position
    keys = sorted({key for stats in seen for key in stats})
    values: dict[str, Any] = {
        key: torch.stack([stats[key] for stats in seen if key in stats]).mean() for key in keys
    }
    comm = layers[0].moe.comm
    if isinstance(comm, MeasuredComm) and comm.measured:
        cpu_ms, cuda_ms = comm.take_times()
        values.update(all_to_all_cpu_time_ms=cpu_ms / len(layers),
                      all_to_all_cuda_time_ms=cuda_ms / len(layers))
    return values


def stats_metrics(stats: LayerStats) -> dict[str, Tensor]:
    """Return the metrics of a single layer. Only first and second choices are included."""
    values = {"entropy_gating": stats.entropy.float()}
    tokens = stats.tokens.float().clamp(min=1)
    experts = stats.load_KE.shape[1]
    chosen_KE = stats.load_KE if stats.chosen_KE is None else stats.chosen_KE
    count = max(math.ceil(SHARE * experts), 1)
    for choice in range(min(2, stats.load_KE.shape[0])):
        load_E, name = stats.load_KE[choice].float(), f"expert{choice + 1}"
        lost = load_E.sum() - stats.kept_KE[choice].sum()
        share_E = 100 * torch.sort(chosen_KE[choice].float(), descending=True).values / tokens
        values[f"overflow_{name}"] = 100 * lost / load_E.sum().clamp(min=1)
        values[f"{name}_balance_top"] = share_E[:count].sum()
        values[f"{name}_balance_bottom"] = share_E[-count:].sum()
        values[f"unused_{name}_count"] = (chosen_KE[choice] == 0).sum().float()
    return values
