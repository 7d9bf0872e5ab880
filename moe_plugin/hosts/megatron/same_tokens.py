"""Tensor-parallel ranks that have the same tokens: what uses that, and which groups it needs.

Without sequence parallelism the N tensor-parallel ranks have the same tokens.

| setting | what each rank routes | needs |
|---|---|---|
| none | its part of the sequence; the host gathers the outputs | |
| `dispatch.name: index_slice` (PPMoE) | all tokens | experts on exactly the tensor-parallel ranks |
| `parallel.replicas: N` (Parm) | S1: its part; S2: all tokens | experts on whole such groups |

With sequence parallelism each has a part of them, and PPMoE's all-reduce is split into its two
halves, as a dense layer's is there: the dispatcher `all_gather`, see `layer_config`. Parm has
nothing to divide then.
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
from moe_plugin.hosts.megatron.translate import Translation
from moe_plugin.routing.call import hand_token_ids


# Token ids of Megatron's batches, see `moe_plugin.routing.call`; and when an optimizer step
# ends.
def give_token_ids(model: nn.Module) -> None:
    """Hand a GPT model's `input_ids` [B, S] to the MoE layers in it that need them.

    Before each forward pass of the model (chunk).

    Call it on what the model provider returns. Every pipeline stage must be called with the tokens,
    not the first alone.
    """
    hand_token_ids(model, "input_ids")


def ids_of(x_SBD: Tensor, tokens_BS: Tensor | None, needs: frozenset[str], rank: int,
           sequence_parallel: bool = False) -> Tensor | None:
    """Ids int64 [s, B] of this tensor-parallel rank's part; None where they are not needed.

    Args:
        x_SBD: [s, B, D], part number `rank` of the sequence.
        tokens_BS: int64 [B, S], ids of the whole sequence; of packed ones [1, B * S], which
            Megatron may give an MoE layer sample by sample.
        needs: of the router.
        sequence_parallel: packed ones were cut among the ranks before that.
    Raises:
        ValueError: ids are needed and not given.
    """
    if "token_ids" not in needs:
        return None
    if tokens_BS is None:
        raise ValueError(
            "input_ids=None does not fit this router, which needs token ids on every pipeline "
            "stage; call moe_plugin.hosts.megatron.same_tokens.give_token_ids(model) in the model "
            "provider")
    length, batch = x_SBD.shape[:2]
    if batch > tokens_BS.shape[0]:
        if sequence_parallel:
            tokens_BS, rank = tokens_BS[:, rank * length * batch :][:, : length * batch], 0
        tokens_BS = tokens_BS.view(batch, -1)
    mine_SB = tokens_BS.t()[rank * length : (rank + 1) * length]
    # past the end: padding, not routed
    return torch.cat([mine_SB, mine_SB.new_zeros(length - mine_SB.shape[0], batch)])


class StepClock:
    """Tells when the first micro-batch of a new step begins.

    By Megatron's own count of micro-batches per step.

    Where Megatron's count is not set (training loops other than its own) it never does: these call
    `moe_plugin.routing.finish_step`.
    """

    def __init__(self) -> None:
        self.left: int | None = None

    def new_step(self, microbatches: int | None) -> bool:
        """Call it once per training pass; True: a step has ended before this pass.

        microbatches: per step; None: not known.
        """
        if microbatches is None:
            return False
        ended = self.left == 0
        if self.left in (None, 0):
            self.left = microbatches
        self.left -= 1
        return ended

    def ended(self) -> bool:
        """Whether a step has ended that `new_step` has not reported; it counts as reported.

        Asked before a checkpoint is written.
        """
        ended, self.left = self.left == 0, None if self.left == 0 else self.left
        return ended


def layer_config(native: Any, asked: MoEConfig) -> MoEConfig:
    """The settings asked for, as they are under this `TransformerConfig`'s sequence parallelism and
    overlap of exchanges, whose steps have one layout.
    """
    if setting(native, "overlap_moe_expert_parallel_comm") and asked.parallel.mode is None:
        asked = dataclasses.replace(asked, parallel=dataclasses.replace(asked.parallel,
                                                                        mode="fixed"))
    if not (native.sequence_parallel and _inside(asked)):
        return asked
    return dataclasses.replace(asked, dispatch=dataclasses.replace(asked.dispatch,
                                                                   name="all_gather"))


def shares_tokens(native: Any, plan: Translation, groups: MegatronGroups) -> bool:
    """Whether the layer itself gets all tokens that the ranks of its tensor-parallel group share.

    Args:
        native: `TransformerConfig`.
        plan: its translation.
        groups: Megatron's.
    Raises:
        ValueError: what was asked for does not fit these groups; it names the nearest that does.
    """
    name, replicas = plan.config.dispatch.name, plan.config.parallel.replicas
    ranks = groups.tensor.size()
    inside = _inside(plan.config)
    if replicas not in (1, ranks):
        raise ValueError(
            f"parallel.replicas={replicas} does not fit tensor_model_parallel_size={ranks}: must "
            f"be 1 or {ranks}, the number of ranks that have the "
            f"same tokens; the nearest is {min((1, ranks), key=lambda n: abs(n - replicas))}")
    if not inside and replicas == 1:
        return False
    asked = f"dispatch.name={name!r}" if inside else f"parallel.replicas={replicas}"
    if inside:
        _check_inside(asked, groups)
    else:
        _check_whole_groups(asked, groups)
    if ranks == 1:
        return False
    if native.sequence_parallel:
        if inside:
            return False
        raise ValueError(
            f"{asked} does not fit sequence_parallel=True, under which tensor-parallel ranks have "
            "different tokens: there is nothing to share "
            "out; leave out --sequence-parallel, or use parallel.replicas=1, which then routes as "
            "Parm's S1 does"
        )
    if plan.native_router:
        raise ValueError(
            f"{asked} does not fit Megatron's own router, which {', '.join(plan.native_router)} "
            "asks for: its losses count tokens once a "
            "tensor-parallel rank; leave that setting out, or use dispatch.name='ragged' and "
            "parallel.replicas=1"
        )
    return True


def _inside(config: MoEConfig) -> bool:
    return dispatchers.get(config.dispatch.name).traits.shares_tokens


def _check_inside(asked: str, groups: MegatronGroups) -> None:
    tensor, experts = _ranks(groups)
    if experts != tensor:
        nearest = f"parallel.replicas={len(tensor)} (Parm)" if _whole_groups(groups) and len(
            tensor) > 1 else "dispatch.name='ragged'"
        raise ValueError(
            f"{asked} does not fit experts on ranks {experts} with tensor-parallel ranks {tensor}: "
            "they must be the same; use "
            f"expert_model_parallel_size=1 and expert_tensor_parallel_size={len(tensor)}; the "
            f"nearest with these groups is {nearest}"
        )


def _check_whole_groups(asked: str, groups: MegatronGroups) -> None:
    if not _whole_groups(groups):
        tensor, experts = _ranks(groups)
        raise ValueError(
            f"{asked} does not fit experts on ranks {experts} with tensor-parallel ranks {tensor}: "
            "they must be whole tensor-parallel groups; "
            "make expert_model_parallel_size * expert_tensor_parallel_size a multiple of "
            f"{len(tensor)}; the nearest with these groups is "
            "parallel.replicas=1, where each rank takes its part of the sequence")


def _whole_groups(groups: MegatronGroups) -> bool:
    tensor, experts = _ranks(groups)
    start = experts.index(dist.get_rank()) // len(tensor) * len(tensor)
    return experts[start : start + len(tensor)] == tensor


def _ranks(groups: MegatronGroups) -> tuple[list[int], list[int]]:
    return dist.get_process_group_ranks(groups.tensor), dist.get_process_group_ranks(groups.experts)
