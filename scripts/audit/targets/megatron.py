"""Audit targets for Megatron-core's own MoE layer, with Megatron's DDP, schedule, optimizer and
clipping.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from scripts.audit.contract import Batch, HeldPart, Parts
from scripts.audit.reference import TINY
from scripts.audit.targets.plain import TinyNetwork
from scripts.bench.peers.megatron import native_layer


class _Network(TinyNetwork):
    """The network `TINY`, with the interface that Megatron's schedule requires."""

    model_type = None

    def __init__(self, layer: Any, config: Any) -> None:
        super().__init__(layer, lambda layer, x: layer(x[:, None, :])[0][:, 0, :])
        self.config = config

    def set_input_tensor(self, tensor: Any) -> None:
        """Do nothing, because this stage has no preceding pipeline stage."""


class Megatron:
    """The audit target for Megatron's all-to-all dispatcher. Each loss is the mean over the tokens
    of one micro-batch.
    """

    supports: tuple[str, ...] = ("accumulation", "clipping", "recompute")
    dispatcher, per_token = "alltoall", False

    def build(self, ranks: int, ep: int) -> Parts:
        """Build the model with Megatron's `SequentialMLP`.

        Each expert of this rank is a separate module that stores gate and up in a single matrix.
        """
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

        from moe_plugin.hosts.megatron.compat import cpu, names

        cpu.enable(force=True)
        parallel_state.initialize_model_parallel(expert_model_parallel_size=ep)
        model_parallel_cuda_manual_seed(1)
        self.config = self._config(ep)
        layer = native_layer(self.config)
        self.layer, network = layer, _Network(layer, self.config)
        self.model = names.DistributedDataParallel(
            config=self.config, ddp_config=names.DistributedDataParallelConfig(), module=network)
        self.optimizer = names.get_megatron_optimizer(
            names.OptimizerConfig(optimizer="sgd", lr=0.0, weight_decay=0.0, sgd_momentum=0.0,
                                  clip_grad=0.0), [self.model])
        self.config.finalize_model_grads_func = names.finalize_model_grads
        first = dist.get_rank() % ep * (TINY.num_experts // ep)
        parts: dict[str, Any] = {**network.dense_parts(), "router": layer.router.weight}
        parts |= {"gate": [], "up": [], "down": []}
        for expert, module in enumerate(layer.experts.local_experts, first):
            gate_and_up = module.linear_fc1.weight
            parts["gate"].append(HeldPart(gate_and_up, expert, slice(0, TINY.hidden)))
            parts["up"].append(HeldPart(gate_and_up, expert, slice(TINY.hidden, None)))
            parts["down"].append(HeldPart(module.linear_fc2.weight, expert))
        return parts

    def _config(self, ep: int) -> Any:
        from moe_plugin.hosts.megatron.compat.names import TransformerConfig

        return TransformerConfig(
            num_layers=1, hidden_size=TINY.width, num_attention_heads=1,
            num_moe_experts=TINY.num_experts, moe_ffn_hidden_size=TINY.hidden,
            moe_router_topk=TINY.top_k, moe_token_dispatcher_type=self.dispatcher,
            moe_router_load_balancing_type="none", add_bias_linear=False, gated_linear_unit=True,
            activation_func=torch.nn.functional.silu, expert_model_parallel_size=ep,
            use_cpu_initialization=True, gradient_accumulation_fusion=False,
            calculate_per_token_loss=self.per_token)

    def step(self, batch: Batch) -> dict[str, float]:
        """Run Megatron's schedule without pipelining, and then the optimizer with learning rate 0.
        """
        from moe_plugin.hosts.megatron.compat import names

        self.layer.moe_layer_recompute = batch.recompute
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = names.get_forward_backward_func()(
            forward_step_func=self._forward, data_iterator=iter(batch.micro_batches),
            model=[self.model], num_microbatches=len(batch.micro_batches), seq_length=1,
            micro_batch_size=1, forward_only=False)
        summed = torch.stack(losses).sum(0)
        dist.all_reduce(summed)
        for optimizer in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            optimizer.config.clip_grad = batch.clip or 0.0
        _, norm, _ = self.optimizer.step()
        answer = {"loss": float(summed[0] / summed[1])}
        return answer if batch.clip is None else {**answer, "norm": float(norm)}

    def _forward(self, batches: Iterator[tuple[Tensor, Tensor]], model: nn.Module) -> Any:
        x, y = next(batches)

        def loss_of(out: Tensor) -> Any:
            tokens = torch.tensor(len(x), dtype=torch.int)
            loss = (out - y).square().mean(1).sum()
            return loss, tokens, torch.stack([loss.detach(), tokens.float()])

        return model(x), loss_of


class MegatronAllGather(Megatron):
    """The audit target for Megatron's all-gather dispatcher."""

    dispatcher = "allgather"


class MegatronPerToken(Megatron):
    """The audit target for Megatron's setting `calculate_per_token_loss`."""

    supports = (*Megatron.supports, "per_token")
    per_token = True
