"""Experts that users bring as modules, and building the experts of one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from moe_plugin.comm.placement import HostContext, Placement
from moe_plugin.config import MoEConfig
from moe_plugin.experts.base import Experts, expert_kinds
from moe_plugin.kernels.expert_ffn import apply_to_rows
from moe_plugin.records import ExpertRows, RowCounts
from moe_plugin.utils.machine import memory_bytes


class CustomExperts(Experts):
    """Any modules as experts: `factory(global_index)` makes one that maps [rows, D] to [rows, D].

    They need whole experts on a rank (num_experts >= ranks). Parameters are marked as experts'.
    """

    def __init__(self, factory: Callable[[int], nn.Module], placement: Placement) -> None:
        super().__init__()
        if placement.shards > 1:
            raise ValueError(
                f"custom experts cannot be split into {placement.shards} shards: "
                f"num_experts={placement.experts} must be >= the "
                f"{placement.comm.size} expert-parallel ranks; use more experts or fewer ranks, "
                "and leave parallel.shards out"
            )
        self.first = placement.comm.rank * placement.local
        self.local_experts = nn.ModuleList(
            factory(self.first + slot) for slot in range(placement.local))
        self.mark()

    def forward(self, work: ExpertRows) -> Tensor:
        """See `Experts`.

        Raises:
            ValueError: an expert's result has not the shape of its rows.
        """
        return apply_to_rows(self._each, work.x, work.rows)

    def _each(self, rows_RD: Tensor, counts: RowCounts) -> Tensor:
        # each expert, also on zero rows, so that every parameter gets a gradient
        parts = rows_RD.split(counts.host)
        results = [expert(rows) for expert, rows in zip(self.local_experts, parts, strict=True)]
        for slot, (result, rows) in enumerate(zip(results, parts, strict=True)):
            if not isinstance(result, Tensor) or result.shape != rows.shape:
                raise self._refused(slot, rows, result)
        return torch.cat(results)

    def _refused(self, slot: int, rows: Tensor, result: object) -> ValueError:
        # rows of another number would move those of all later experts to other tokens
        found = (f"a tensor of shape {tuple(result.shape)}" if isinstance(result, Tensor) else
                 f"a {type(result).__name__}")
        return ValueError(
            f"expert {self.first + slot} ({type(self.local_experts[slot]).__name__}) returned "
            f"{found} for rows of shape {tuple(rows.shape)}: must be equal; let it map [rows, "
            f"{rows.shape[1]}] to [rows, {rows.shape[1]}]")


_MATRICES = {"ffn": 2, "gated_ffn": 3}


def build_device_experts(config: MoEConfig, place: Placement, host: HostContext,
                  factory: Callable[[int], nn.Module] | None, **where: Any) -> Experts:
    """The experts of this rank, of the configured kind.

    Args:
        factory: `factory(global_index) -> module`: custom experts instead; None: as configured.
        where: dtype and device of the parameters.
    """
    if factory is not None:
        return CustomExperts(factory, place)
    return expert_kinds.get(config.experts.kind)(config, place, host=host, **where)


def check_memory(config: MoEConfig, place: Placement, factory: Callable[[int], nn.Module] | None,
                 dtype: torch.dtype | None, device: Any) -> None:
    """Check, before anything is allocated, that this rank's weights can fit its memory at all.

    Nothing is checked on the meta device, for experts that are not ours, and for those on disk.

    Args:
        factory: see `build_device_experts`.
        dtype, device: of the parameters, as for torch's modules.
    Raises:
        ValueError: they are larger than the whole memory.
    """
    store = config.experts.store
    like = torch.empty(0, dtype=dtype, device="cpu" if store == "host" else device)
    memory = memory_bytes(like.device)
    if (memory is None or store == "disk" or factory is not None
            or config.experts.kind not in _MATRICES):
        return
    width, matrices = config.model_dim, _MATRICES[config.experts.kind]
    elements = width * (config.num_experts + matrices * config.experts.shared_hidden_dim)
    elements += matrices * config.row_dim * place.local * (config.hidden_dim // place.shards)
    if elements * like.element_size() > memory:
        raise ValueError(
            f"num_experts={config.num_experts} with model_dim={width}, "
            f"hidden_dim={config.hidden_dim} needs {elements * like.element_size() / 2**30:.3g} "
            f"GiB for the weights of this rank: must be <= the {memory / 2**30:.3g} GiB of "
            f"{like.device}; use more ranks, or fewer or narrower experts")
