"""Experts that are arbitrary modules, and functions that build the experts of a rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from moe_plugin.comm.placement import HostContext, Placement
from moe_plugin.config import MoEConfig
from moe_plugin.experts.base import Experts, expert_kinds
from moe_plugin.kernels.expert_ffn import apply_to_rows
from moe_plugin.records import ExpertRows, ParameterRequest, RowCounts
from moe_plugin.utils.machine import memory_bytes


class CustomExperts(Experts):
    """Experts that are arbitrary modules created by the user.

    Arbitrary modules cannot be split into shards, so the number of experts must be at least the
    number of ranks. All parameters of the modules are marked as expert parameters.

    Args:
        factory: a function `factory(global_index)` that returns the module of one expert. The
            module must map [rows, D] to [rows, D].
        placement: describes which ranks store each expert.
    Raises:
        ValueError: If the placement splits experts into shards.
    """

    def __init__(self, factory: Callable[[int], nn.Module], placement: Placement) -> None:
        super().__init__()
        if placement.shards > 1:
            raise ValueError(
                f"custom experts cannot be split into {placement.shards} shards, so "
                f"num_experts={placement.experts} must be >= the number of expert-parallel ranks, "
                f"{placement.comm.size}. Use more experts or fewer ranks, without parallel.shards"
            )
        self.first = placement.comm.rank * placement.local
        self.local_experts = nn.ModuleList(
            factory(self.first + slot) for slot in range(placement.local))
        self.mark()

    def forward(self, work: ExpertRows | ParameterRequest) -> Tensor:
        """See `Experts`.

        Raises:
            ValueError: If an expert's output does not have the same shape as its input rows.
        """
        assert isinstance(work, ExpertRows), "parameters are only asked of experts that gather"
        return apply_to_rows(self._each, work.x, work.rows)

    def _each(self, rows_RD: Tensor, counts: RowCounts) -> Tensor:
        # experts without rows are called, too, so that every parameter gets a gradient
        parts = rows_RD.split(counts.host)
        results = [expert(rows) for expert, rows in zip(self.local_experts, parts, strict=True)]
        for slot, (result, rows) in enumerate(zip(results, parts, strict=True)):
            if not isinstance(result, Tensor) or result.shape != rows.shape:
                raise self._refused(slot, rows, result)
        return torch.cat(results)

    def _refused(self, slot: int, rows: Tensor, result: object) -> ValueError:
        # a wrong number of rows would shift the rows of all later experts to other tokens
        found = (f"a tensor of shape {tuple(result.shape)}" if isinstance(result, Tensor) else
                 f"a {type(result).__name__}")
        return ValueError(
            f"expert {self.first + slot} ({type(self.local_experts[slot]).__name__}) returned "
            f"{found} for rows of shape {tuple(rows.shape)}, but the shapes must be equal. An "
            f"expert must map [rows, {rows.shape[1]}] to [rows, {rows.shape[1]}]")


_MATRICES = {"ffn": 2, "gated_ffn": 3}


def build_device_experts(config: MoEConfig, place: Placement, host: HostContext,
                  factory: Callable[[int], nn.Module] | None, **where: Any) -> Experts:
    """Build the experts of this rank whose parameters are stored on the device.

    Args:
        factory: a function `factory(global_index) -> module` that creates a custom expert. By
            default, experts of the configured type are built.
        where: the dtype and device of the parameters.
    """
    if factory is not None:
        return CustomExperts(factory, place)
    kind: Callable[..., Experts] = expert_kinds.get(config.experts.kind)
    return kind(config, place, host=host, **where)


def check_memory(config: MoEConfig, place: Placement, factory: Callable[[int], nn.Module] | None,
                 dtype: torch.dtype | None, device: Any) -> None:
    """Before allocating memory, check that the weights of this rank fit in the device's memory.

    The check is skipped on the meta device, for custom experts, and for experts that are stored on
    disk.

    Args:
        config: the settings of the layer.
        place: describes which ranks store each expert.
        factory: the function that creates custom experts, or None.
        dtype: the dtype of the parameters. Defaults to torch's default dtype.
        device: the device of the parameters. Defaults to torch's default device.
    Raises:
        ValueError: If the weights are larger than the total memory of the device.
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
            f"GiB for the weights of this rank, but {like.device} has {memory / 2**30:.3g} GiB. "
            "Use more ranks, or fewer or narrower experts")
