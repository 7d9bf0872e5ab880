"""Make this package's routers follow Megatron's `RouterReplay`.

With `moe_enable_routing_replay=True` (Megatron-core 0.16 and newer), every router has a
`RouterReplay` object. A reinforcement learning framework sets an action on these objects: to record
the chosen experts, to use given experts in forward passes, or to use the experts of earlier forward
passes in recomputations. Frameworks find the objects in a list, in which the layers of a rank are
ordered as they were built.

verl replaces the class by its own class of the same form (`verl/utils/megatron
/router_replay_patch.py`). This class may also have a mask of the tokens that are replayed. Without
choices, the router chooses, for example in layers for multi-token prediction. verl finds the
objects in its own list, or through the modules of Megatron's router class.
"""

from __future__ import annotations

import sys
from typing import Any

from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from moe_plugin.hosts.megatron.compat.settings import setting
from moe_plugin.hosts.megatron.refusals import ROUTER_REPLAY
from moe_plugin.routing.call import RoutingCall, check_range
from moe_plugin.routing.replay import replayed
from moe_plugin.routing.rollouts import check_replaceable, check_tokens

NAME = "moe_enable_routing_replay=True"
_VERL = "verl.utils.megatron.router_replay_patch"


def follow_replay(config: Any, router: Any, replicas: int, split: bool) -> FollowsReplay | None:
    """Create the `RouterReplay` of a layer, and make the layer's router follow it. Return None if
    the `TransformerConfig` does not enable routing replay.

    The `RouterReplay` adds itself to the framework's list of layers.

    Args:
        config: Megatron's `TransformerConfig`.
        router: the layer's router.
        replicas: the setting `parallel.replicas`.
        split: True if each tensor-parallel rank routes only a part of the tokens that it receives.
    Raises:
        ValueError: If the choices of the router cannot be replaced, or if the tokens of the router
            are not those of the rank.
    """
    verl: Any = sys.modules.get(_VERL) if hasattr(TopKRouter, "_router_replay_patched") else None
    if verl is not None and (getattr(config, "enable_routing_replay", False)
                             or setting(config, "moe_enable_routing_replay")):
        replay = verl.RouterReplay()
    elif setting(config, "moe_enable_routing_replay"):
        from megatron.core.transformer.moe.router_replay import RouterReplay

        replay = RouterReplay()
    else:
        return None
    ROUTER_REPLAY.refuse({"parallel.replicas": replicas, "split_tokens": split})
    return FollowsReplay(replay, router, None if verl is None else VerlHandle(replay))


class VerlHandle(TopKRouter):
    """A module without parameters or a forward pass, through which verl finds a `RouterReplay`."""

    def __init__(self, replay: Any) -> None:
        nn.Module.__init__(self)
        self.router_replay = replay
        self.layer_number: Any = None
        self.global_tokens_per_expert = None  # read by Megatron at the end of a step


class FollowsReplay:
    """A callable for `Router.forced` that records and replays the choices of one router, as the
    action of a `RouterReplay` requires.

    A recomputation uses the choices that were recorded in its first pass (`moe_plugin.routing
    .replay`), which are those of Megatron's list. The list is shortened in the same way as by
    Megatron's router.

    Args:
        replay: Megatron's object for the layer.
        router: the layer's router.
        handle: a module that the layer registers for verl. None without verl.
    Attributes:
        balances_best: True while choices are replayed. Losses then count the choices that the
            router would have made without the replay, as in Megatron.
    Raises:
        ValueError: If the choices of the router cannot be replaced.
    """

    def __init__(self, replay: Any, router: Any, handle: VerlHandle | None = None) -> None:
        self.replay, self.balances_best, self.handle = replay, False, handle
        self.target_TK: Tensor | None = None  # choices for the current pass
        self.replayed_T: Tensor | None = None  # tokens whose choices are used, or None for all
        self.follow(router)

    def follow(self, router: Any) -> None:
        """Record and replay the choices of another router, which replaces the current one."""
        check_replaceable(router, NAME)
        self.router = router
        router.router_replay, router.forced = self.replay, self
        router.register_forward_pre_hook(self._begin)

    def set_layer_number(self, layer_number: int) -> None:
        """Set the number of the layer, as Megatron sets it."""
        self.replay.layer_number = layer_number
        if self.handle is not None:
            self.handle.layer_number = layer_number

    @property
    def action(self) -> str | None:
        """Action for the current pass: "record", "replay_forward", "replay_backward" or None."""
        action = self.replay.router_replay_action
        return None if action is None else action.value

    def _begin(self, *_: Any) -> None:
        # Called before every pass. A recomputation may not call `__call__`.
        self.target_TK = self.replay.target_topk_idx
        self.replayed_T = getattr(self.replay, "target_replay_mask", None)
        if self.action == "replay_backward":
            waiting = self.replay.replay_backward_list
            masks = getattr(self.replay, "replay_backward_mask_list", None)
            self.target_TK = waiting.pop(0) if waiting else None
            self.replayed_T = masks.pop(0) if masks else None
        # The framework may have changed the action before a recomputation.
        self.balances_best = replayed(
            self, lambda: self.action not in (None, "record"), self.router.training,
            what="action of RouterReplay", values=False)

    def __call__(self, call: RoutingCall) -> Tensor | None:
        """Return the experts for this pass, int64 [T, K], or None if the router must choose.

        Raises:
            ValueError: If the framework did not set the choices to replay, or if the number of
                tokens, the number of experts per token or an expert index does not match.
        """
        action = self.action
        if action is None or (self.target_TK is None and self.handle is not None
                              and action != "record"):
            return None
        if action == "record":
            ids_TK: Tensor = self.router.select(call)
            self.replay.record_indices(ids_TK)
            return ids_TK
        ids_TK = self._target(action)
        check_tokens(ids_TK, call.logits_TE.shape[0], call.k, "set_replay_data")
        check_range(ids_TK, -1, call.experts - 1,
                    "The experts in RouterReplay are in {}..{}, but must be in -1.."
                    f"{call.experts - 1}. Pass the choices of this model.")
        # verl marks tokens without a recorded choice by zeros. As in rollouts, the router replaces
        # all choices of such a token.
        sorted_TK = ids_TK.sort(1).values
        missing_T1 = (sorted_TK[:, :1] < 0) | (sorted_TK[:, 1:] == sorted_TK[:, :-1]).any(
            1, keepdim=True)
        if self.replayed_T is not None:
            missing_T1 = missing_T1 | ~self.replayed_T.to(missing_T1.device).bool().view(-1, 1)
        complete = missing_T1.device.type == "cpu" and not bool(missing_T1.any())
        ids_TK = ids_TK.to(call.logits_TE.device)
        if complete:
            return ids_TK
        return self.router.select(call).where(missing_T1.to(ids_TK.device), ids_TK)

    def _target(self, action: str) -> Tensor:
        if self.target_TK is None:
            raise ValueError(
                f"The action of RouterReplay is {action}, but this router has no choices to "
                "replay. Call RouterReplay.set_replay_data before each forward pass, or "
                "RouterReplay.clear_global_router_replay_action.")
        return self.target_TK.long()
