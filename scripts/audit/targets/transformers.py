"""Audit targets for a Mixtral model of `transformers`. There is one target for each of the ways in
which `transformers` exchanges tokens.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.distributed as dist

from scripts.audit.contract import Batch, Parts
from scripts.audit.mixtral import MIXTRAL


def mixtral_config() -> Any:
    """Return the configuration of a `transformers` Mixtral model that computes the same function as
    `MIXTRAL`.
    """
    import transformers

    return transformers.MixtralConfig(
        vocab_size=MIXTRAL.vocabulary, hidden_size=MIXTRAL.width, num_hidden_layers=1,
        intermediate_size=MIXTRAL.hidden, num_attention_heads=MIXTRAL.heads,
        num_key_value_heads=MIXTRAL.key_heads, num_local_experts=MIXTRAL.num_experts,
        num_experts_per_tok=MIXTRAL.top_k, max_position_embeddings=32, bos_token_id=1,
        eos_token_id=2, pad_token_id=None, rms_norm_eps=MIXTRAL.epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": MIXTRAL.theta})


def recompute(network: Any, on: bool) -> None:
    """Enable or disable activation checkpointing in the model."""
    if on:
        network.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        network.gradient_checkpointing_disable()


class Transformers:
    """The audit target for `all_to_all`, with FSDP over all ranks and expert parallelism over `ep`
    ranks.
    """

    supports: tuple[str, ...] = ("accumulation", "clipping", "recompute", "per_token")
    model = MIXTRAL
    implementation = "all_to_all"

    def mesh(self, ranks: int, ep: int) -> dict[str, Any]:
        """Return the mesh sizes for the `DistributedConfig` of `transformers`."""
        return {"fsdp_size": ranks, "ep_size": ep}

    def build(self, ranks: int, ep: int) -> Parts:
        """Build the model with `from_pretrained`. The parameters of the model are DTensors."""
        import transformers
        from transformers.distributed import DistributedConfig

        self.sources = ranks // self.tokens_shared(ranks, ep)
        options = {} if ranks == 1 else {"distributed_config": DistributedConfig(
            **self.mesh(ranks, ep), ep_implementation=self.implementation)}
        with tempfile.TemporaryDirectory() as folder:
            paths = [folder]
            dist.broadcast_object_list(paths)  # only rank 0 of the group writes the model
            if dist.get_rank() == 0:
                transformers.MixtralForCausalLM(mixtral_config()).save_pretrained(paths[0])
            dist.barrier()
            self.network = transformers.AutoModelForCausalLM.from_pretrained(paths[0], **options)
            dist.barrier()
        self.network.train()
        return dict(self.network.named_parameters())

    def tokens_shared(self, ranks: int, ep: int) -> int:
        """Return 1, because every data-parallel rank has different tokens."""
        return 1

    def step(self, batch: Batch) -> dict[str, float]:
        """Run the training step as `Trainer` does.

        Losses are divided by `num_items_in_batch`, and multiplied by the number of ranks over which
        FSDP averages gradients.
        """
        recompute(self.network, batch.recompute)
        self.network.zero_grad()
        total = torch.zeros(())
        for x, y in batch.micro_batches:
            loss = self.network(x, labels=x, shift_labels=y.contiguous(),
                                num_items_in_batch=batch.tokens).loss
            (loss * self.sources).backward()
            total += loss.detach()
        dist.all_reduce(total)
        answer = {"loss": float(total) * self.sources / dist.get_world_size()}
        if batch.clip is not None:
            answer["norm"] = self._clip(batch.clip)
        return answer

    def _clip(self, bound: float) -> float:
        """Clip gradients as `Trainer` does, which computes the norm separately for each mesh."""
        import transformers

        if dist.get_world_size() == 1:
            return float(torch.nn.utils.clip_grad_norm_(self.network.parameters(), bound))
        norm = transformers.Trainer._mixed_mesh_grad_norm(None, self.network, bound)
        return float(norm)


class TransformersAllReduce(Transformers):
    """The audit target for `all_reduce`, in which all ranks of an expert-parallel group process the
    same tokens.

    Tensor parallelism and expert parallelism use the same ranks.
    """

    implementation = "all_reduce"

    def mesh(self, ranks: int, ep: int) -> dict[str, Any]:
        """Return mesh sizes that split attention over the ranks of an expert-parallel group."""
        return {"tp_size": ep, "ep_size": ep, "fsdp_size": ranks // ep}

    def tokens_shared(self, ranks: int, ep: int) -> int:
        """Return `ep`, because all ranks of an expert-parallel group have the same tokens."""
        return ep


class TransformersOurs(Transformers):
    """The audit target for this package's exchange in `transformers`."""

    implementation = "moe_plugin"

    def build(self, ranks: int, ep: int) -> Parts:
        """Register this package's exchange, and build the model."""
        import moe_plugin.hosts.transformers  # noqa: F401 - registers the name

        return super().build(ranks, ep)
