"""Settings for tensor-parallel ranks that have the same tokens, and the process groups that these
settings require.

Without sequence parallelism, all N tensor-parallel ranks have the same tokens.

| setting | tokens that each rank routes | requirement |
|---|---|---|
| default | its part of the sequence; the host gathers the outputs | |
| `dispatch.name: index_slice` (PPMoE) | all tokens | expert ranks equal tensor-parallel ranks |
| `parallel.replicas: N` (Parm) | S1: its part; S2: all tokens | experts on whole such groups |

With sequence parallelism, each rank has only its own slice of the sequence. With sequence
parallelism, PPMoE's all-reduce is split into a reduce-scatter and an all-gather, as in a dense
layer. PPMoE then uses the dispatcher `all_gather`. See `layer_config`. With sequence parallelism,
Parm has no effect, because no two ranks have the same tokens.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_plugin.config import MoEConfig
from moe_plugin.dispatch import dispatchers
from moe_plugin.hosts.megatron.compat.core import MegatronGroups
from moe_plugin.hosts.megatron.compat.settings import setting
from moe_plugin.hosts.megatron.refusals import SHARED_TOKENS
from moe_plugin.hosts.megatron.translate import Translation
from moe_plugin.routing.call import hand_token_ids


def give_token_ids(model: nn.Module) -> None:
    """Pass the `input_ids` [B, S] of a GPT model to the MoE layers whose routers need token ids.

    The ids are passed before each forward pass of the model chunk. Call this function on the model
    that the model provider returns. The model chunk must receive the token ids on every pipeline
    stage, not only on the first stage.
    """
    hand_token_ids(model, "input_ids")


def ids_of(x_SBD: Tensor, tokens_BS: Tensor | None, needs: frozenset[str], rank: int,
           sequence_parallel: bool = False) -> Tensor | None:
    """Return the token ids of the current tensor-parallel rank's slice of the sequence, as an int64
    tensor [s, B].

    Return None if the router does not need token ids.

    Args:
        x_SBD: activations [s, B, D] of the slice of the sequence with index `rank`.
        tokens_BS: token ids of the whole sequence as an int64 tensor [B, S]. For packed sequences,
            which Megatron may pass to an MoE layer sample by sample, the shape is [1, B * S].
        needs: names of the inputs that the router needs.
        rank: index of this slice of the sequence.
        sequence_parallel: True if packed sequences were first split among ranks and then separated
            into samples.
    Raises:
        ValueError: If the router needs token ids but `tokens_BS` is None.
    """
    if "token_ids" not in needs:
        return None
    if tokens_BS is None:
        raise ValueError(
            "input_ids=None cannot be used with this router, which needs token ids on every "
            "pipeline stage. Call "
            "moe_plugin.hosts.megatron.same_tokens.give_token_ids(model) in the model provider.")
    length, batch = x_SBD.shape[:2]
    if batch > tokens_BS.shape[0]:
        if sequence_parallel:
            tokens_BS, rank = tokens_BS[:, rank * length * batch :][:, : length * batch], 0
        tokens_BS = tokens_BS.view(batch, -1)
    mine_SB = tokens_BS.t()[rank * length : (rank + 1) * length]
    # positions past the end are padding, which is not routed
    return torch.cat([mine_SB, mine_SB.new_zeros(length - mine_SB.shape[0], batch)])


class StepClock:
    """Detects the first micro-batch of each step from Megatron's number of micro-batches per step.

    Training loops other than Megatron's own do not set this number. Other training loops must call
    `moe_plugin.routing.finish_step` after each step, because this class cannot detect their steps.
    """

    def __init__(self) -> None:
        self.left: int | None = None

    def new_step(self, microbatches: int | None) -> bool:
        """Return True if the current pass is the first pass after the end of a step. Call this
        method once per training pass.

        microbatches: number of micro-batches per step, or None if it is unknown.
        """
        if microbatches is None:
            return False
        ended = self.left == 0
        self.left = (self.left or microbatches) - 1
        return ended

    def ended(self) -> bool:
        """Return True if a step has ended and `new_step` has not reported its end yet. After this
        call, the end of this step is not reported again.

        Call this method before a checkpoint is written.
        """
        ended, self.left = self.left == 0, None if self.left == 0 else self.left
        return ended


def layer_config(native: Any, asked: MoEConfig) -> MoEConfig:
    """Adapt the user's settings to a `TransformerConfig`, and return the adapted settings.

    Changes can be required by two features of Megatron: sequence parallelism and overlapped
    exchanges. Overlapped exchanges are split into steps that support only one parallel layout.
    """
    if setting(native, "overlap_moe_expert_parallel_comm") and asked.parallel.mode is None:
        asked = dataclasses.replace(asked, parallel=dataclasses.replace(asked.parallel,
                                                                        mode="fixed"))
    if not (native.sequence_parallel and _inside(asked)):
        return asked
    return dataclasses.replace(asked, dispatch=dataclasses.replace(asked.dispatch,
                                                                   name="all_gather"))


def shares_tokens(native: Any, plan: Translation, groups: MegatronGroups) -> bool:
    """Return True if the MoE layer receives all tokens that the tensor-parallel ranks share, and
    divides the work itself.

    Args:
        native: `TransformerConfig`.
        plan: return value of `translate` for the `TransformerConfig`.
        groups: process groups created by Megatron.
    Raises:
        ValueError: If a setting is not possible with these process groups. The message contains the
            closest setting that is possible.
    """
    name, replicas = plan.config.dispatch.name, plan.config.parallel.replicas
    ranks = groups.tensor.size()
    inside = _inside(plan.config)
    if replicas not in (1, ranks):
        raise ValueError(
            f"parallel.replicas={replicas} cannot be used with tensor_model_parallel_size={ranks}. "
            f"It must be 1 or {ranks}, the number of ranks that have the same tokens. The nearest "
            f"allowed value is {min((1, ranks), key=lambda n: abs(n - replicas))}.")
    if not inside and replicas == 1:
        return False
    asked = f"dispatch.name={name!r}" if inside else f"parallel.replicas={replicas}"
    if inside:
        _check_inside(asked, groups)
    else:
        _check_whole_groups(asked, groups)
    if ranks == 1:
        return False
    if native.sequence_parallel and inside:
        return False
    SHARED_TOKENS.refuse({"asked": asked, "sequence_parallel": native.sequence_parallel,
                          "native_router": ", ".join(plan.native_router)})
    return True


def _inside(config: MoEConfig) -> bool:
    return dispatchers.get(config.dispatch.name).traits.shares_tokens


def _check_inside(asked: str, groups: MegatronGroups) -> None:
    tensor, experts = _ranks(groups)
    if experts != tensor:
        nearest = f"parallel.replicas={len(tensor)} (Parm)" if _whole_groups(groups) and len(
            tensor) > 1 else "dispatch.name='ragged'"
        raise ValueError(
            f"{asked} cannot be used with experts on ranks {experts} and tensor-parallel ranks "
            f"{tensor}, because the two groups must be equal. Use "
            f"expert_model_parallel_size=1 and expert_tensor_parallel_size={len(tensor)}. The "
            f"nearest setting for these groups is {nearest}.")


def _check_whole_groups(asked: str, groups: MegatronGroups) -> None:
    if not _whole_groups(groups):
        tensor, experts = _ranks(groups)
        raise ValueError(
            f"{asked} cannot be used with experts on ranks {experts} and tensor-parallel ranks "
            f"{tensor}, because experts must use whole tensor-parallel groups. "
            "Make expert_model_parallel_size * expert_tensor_parallel_size a multiple of "
            f"{len(tensor)}. The nearest setting for these groups is "
            "parallel.replicas=1, with which each rank routes its part of the sequence.")


def _whole_groups(groups: MegatronGroups) -> bool:
    tensor, experts = _ranks(groups)
    start = experts.index(dist.get_rank()) // len(tensor) * len(tensor)
    return experts[start : start + len(tensor)] == tensor


def _ranks(groups: MegatronGroups) -> tuple[list[int], list[int]]:
    return dist.get_process_group_ranks(groups.tensor), dist.get_process_group_ranks(groups.experts)
