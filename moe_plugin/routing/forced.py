"""Choices that a router does not make itself: loads for benchmarks, and routing traces.

`router.force: balance` replaces the choice of a router, and nothing else, in every call. Let N be
the real tokens of a rank's call and n = 0, ..., N-1 their numbers in it. Token n goes to experts

    (n + floor(j E / k)) mod E     for j = 0, ..., k-1

These are k different ones, spread evenly over all experts, and so over as many ranks as can be.
Each expert gets floor(N k / E) or ceil(N k / E) of a rank's choices; the same in each layer and
call. Padding takes part in nothing.

* Weights are those that the router gives these experts: its scores, divided by their sum as
  `router.normalize` says, times `router.scaling`. Gradients go through them to the router and to
  the tokens as from any choice; the choice itself has none, as ever.
* Losses are taken of the forced choice and the router's own scores. A load that is even makes the
  load terms of `switch`, `gshard`, `sequence` and `global_batch` constants 1/E: with a softmax they
  are 1 and have no gradient, where E divides N k. The loss `z` is as without it.
* Biases (`sigmoid_bias`) count the forced choice, and stay where it is even.

Megatron's `--moe-router-force-load-balancing` is another thing, and is Megatron's own here: random
logits, which are even on average alone, and whose weights are of the random logits, too.
"""

from __future__ import annotations

from torch import Tensor, nn

from moe_plugin.routing.call import RoutingCall
from moe_plugin.utils.messages import short


def balanced(call: RoutingCall) -> Tensor:
    """The experts of each token as the module says, int64 [T, K]; padding's are of no use."""
    number_T = call.real_T.long().cumsum(0) - 1
    step_K = [j * call.experts // call.k for j in range(call.k)]
    return (number_T[:, None] + number_T.new_tensor(step_K)) % call.experts


def check_replaceable(router: nn.Module, what: str) -> None:
    """`ValueError` unless `what` may replace the choice of a router, and nothing else does."""
    if "force" not in (getattr(router, "reads", None) or ()):
        raise ValueError(
            f"{what} cannot be used with {type(router).__name__}: must be a router with "
            "router.force, such as topk; with Megatron's own use --moe-enable-routing-replay and "
            "its RouterReplay")
    config = router.config
    for name, value, bound in (("force", config.force, "none"), (
            "second_expert_policy", config.second_expert_policy, "all")):
        if value != bound:
            raise ValueError(f"router.{name}={short(value)} does not fit {what}, which says what "
                             f"is chosen: must be {bound}; leave out one of the two")
    if router.forced is not None:
        raise ValueError(f"{what} does not fit {type(router).__name__}, whose choices are replayed "
                         "already: must be one of them; leave out the other")
