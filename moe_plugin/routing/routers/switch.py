"""Switch router: one expert per token."""

from __future__ import annotations

from moe_plugin.routing.registry import routers
from moe_plugin.routing.routers.topk import TopKRouter


@routers.register("switch")
class SwitchRouter(TopKRouter):
    """The likeliest expert, weighted by its probability.

    `router.input_jitter` multiplies the input, as in the paper. Source: Switch Transformer (Fedus
    et al. 2021).
    """

    fixed_k = 1
    one_pass = True
    second_expert_policy = "all"
