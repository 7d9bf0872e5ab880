"""Switch router: one expert per token."""

from __future__ import annotations

from moe_plugin.routing.registry import routers
from moe_plugin.routing.routers.base import SCORED, Router


@routers.register("switch")
class SwitchRouter(Router):
    """The likeliest expert, weighted by its probability.

    `router.input_jitter` multiplies the input, as in the paper. Source: Switch Transformer (Fedus
    et al. 2021).
    """

    reads = SCORED | {"score"}
    fixed_k = 1
