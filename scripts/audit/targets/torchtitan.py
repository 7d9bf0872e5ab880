"""Audit target for torchtitan's MoE layer, with torchtitan's device meshes, FSDP and clipping."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.audit.contract import Batch, Parts
from scripts.audit.reference import TINY
from scripts.audit.targets.plain import TinyNetwork


def _layer(ep: int) -> nn.Module:
    """Build torchtitan's layer with the standard all-to-all and without a bias for load balancing.

    The weights are initialized with zeros, because the audit sets them before each step.
    """
    import spmd_types as spmd
    from torchtitan.models.common import config_utils
    from torchtitan.models.common.moe_sharding import set_moe_sharding_config

    zeros = nn.init.zeros_
    config = config_utils.make_moe_config(
        num_experts=TINY.num_experts, load_balance_coeff=None,
        router=config_utils.make_router_config(
            dim=TINY.width, num_experts=TINY.num_experts, gate_param_init={"weight": zeros},
            top_k=TINY.top_k, score_func="softmax", route_norm=True),
        routed_experts=config_utils.make_routed_experts_config(
            dim=TINY.width, hidden_dim=TINY.hidden, num_experts=TINY.num_experts,
            top_k=TINY.top_k, comm_backend="standard",
            param_init=dict.fromkeys(("w1_EFD", "w2_EDF", "w3_EFD"), zeros)))
    set_moe_sharding_config(
        config, enable_ep=ep > 1, enable_sp=False,
        expert_param_layout={"w1_EFD": spmd.S(1), "w2_EDF": spmd.S(2), "w3_EFD": spmd.S(1)})
    layer: nn.Module = config.build()
    return layer


class _Block(TinyNetwork):
    """The model `TINY` as a transformer block of torchtitan.

    torchtitan's FSDP looks up the experts in the attribute `moe`.
    """

    moe_enabled = True

    def __init__(self, moe: nn.Module) -> None:
        super().__init__(None, lambda _, x_TD: self.moe(x_TD[None])[0])
        self.moe = moe


class _Decoder(nn.Module):
    """A decoder with a single block and the attributes that torchtitan's FSDP requires."""

    enable_weight_tying = False
    tok_embeddings = norm = lm_head = None

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"0": block})

    def forward(self, x_TD: Tensor, recompute: bool) -> Any:
        """Run the block."""
        return self.layers["0"](x_TD, recompute)


class TorchTitan:
    """The audit target for `torchtitan.models.common.moe.MoE`, with expert parallelism and FSDP.

    FSDP is applied by `apply_fsdp_to_decoder`.
    """

    supports = ("accumulation", "clipping", "recompute", "per_token", "empty")

    def build(self, ranks: int, ep: int) -> Parts:
        """Build the model as `parallelize_qwen3` does. The parameters of the model are DTensors."""
        from torchtitan.distributed import parallel_dims
        from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
        from torchtitan.distributed.utils import set_spmd_backend

        self.ep = ep
        parallel_dims.device_type = "cpu"  # torchtitan assumes CUDA if there is no accelerator
        set_spmd_backend("partial_dtensor")
        dims = parallel_dims.ParallelDims(
            dp_replicate=1, dp_shard=ranks, cp=1, tp=1, pp=1, ep=ep, world_size=ranks,
            spmd_backend="partial_dtensor")
        dims.build_mesh()
        block = _Block(_layer(ep))
        self.network = _Decoder(block)
        if ep > 1:
            block.moe.parallelize(dims)
        apply_fsdp_to_decoder(
            self.network, dims.get_mesh(["fsdp"]), torch.float32, torch.float32, pp_enabled=False,
            ep_degree=ep, edp_mesh=dims.get_optional_mesh(["efsdp"]) if ep > 1 else None)
        for module in (block, self.network):  # gloo has no reduction that scales the sum
            module.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
        experts = block.moe.routed_experts.inner_experts
        return {**block.dense_parts(), "router": block.moe.router.gate.weight,
                "gate": experts.w1_EFD, "up": experts.w3_EFD, "down": experts.w2_EDF}

    def step(self, batch: Batch) -> dict[str, float]:
        """Run the training step as torchtitan's `Trainer` does.

        Each loss is a sum divided by the number of valid tokens on all ranks, and FSDP sums the
        gradients over the ranks.
        """
        from torchtitan.distributed.utils import clip_grad_norm_

        self.network.zero_grad()
        total = torch.zeros(())
        # torchtitan's experts always cast to bfloat16; the audit compares float32 results
        with mock.patch.object(Tensor, "bfloat16", Tensor.float):
            for x, y in batch.micro_batches:
                out = self.network(x, batch.recompute)
                loss = F.mse_loss(out, y, reduction="sum") / TINY.width / batch.tokens
                loss.backward()
                total += loss.detach()
        dist.all_reduce(total)
        answer = {"loss": float(total)}
        if batch.clip is not None:
            answer["norm"] = float(clip_grad_norm_(
                list(self.network.parameters()), batch.clip, foreach=True,
                ep_enabled=self.ep > 1))
        return answer
