"""The cosine router. The scores of this router depend only on the direction of a token vector."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_plugin.kernels.scores import linear_scores
from moe_plugin.routing.call import RoutingCall
from moe_plugin.routing.contract import FORCED, WITH_POLICY, keep_init
from moe_plugin.routing.registry import routers
from moe_plugin.routing.routers.topk import TopKRouter
from moe_plugin.utils.dtensors import fill_, xavier_

START, MOST = math.log(1 / 0.5), math.log(1 / 0.01)
SHORT = 1e-4  # vectors up to this length are treated as zero


@routers.register("cosine")
class CosineRouter(TopKRouter):
    """A router whose logits are `exp(min(temperature, log 100)) * cos(P x + b, a_e)`.

    Tokens and experts are compared in `cosine_dim` dimensions. The projection P, the bias b, the
    directions of the experts `a_e` and the temperature (initially log 2) are learned. In all other
    respects, the router is equivalent to the topk router. Source: the cosine gate of Tutel (Hwang
    et al., 2022); Chi et al., 2022.

    The cosine `cos(y, a)` is the dot product of `y / |y|` and `a / |a|`. If `|y| <= 1e-4`, the
    cosine is 0 and the gradient with respect to y is zero. Without the limit on `|y|`, a row of
    zeros (for example a padding token without a mask) could have an arbitrarily large gradient.
    """

    reads = WITH_POLICY | FORCED | {"cosine_dim"}
    multiplies_in_blocks = False

    def build(self, dtype: torch.dtype | None, device: Any) -> None:
        """Create the projection, the bias, the directions and the temperature. Host frameworks must
        not initialize the parameters again.
        """
        where, width = {"dtype": dtype, "device": device}, self.config.cosine_dim
        self.project_PD = nn.Parameter(torch.empty(width, self.model_dim, **where))
        self.project_P = nn.Parameter(torch.empty(width, **where))
        self.direction_EP = nn.Parameter(torch.empty(self.num_experts, width, **where))
        self.temperature = nn.Parameter(torch.empty(1, **where))
        for parameter in self.parameters():
            keep_init(parameter)

    def reset_parameters(self) -> None:
        """Initialize the projection with the Xavier distribution, the directions with a standard
        deviation of 0.01, and the temperature to log 2.
        """
        xavier_(self.project_PD)
        fill_(self.direction_EP, torch.randn(self.direction_EP.shape) * 0.01)
        with torch.no_grad():
            self.project_P.zero_()
            self.temperature.fill_(START)

    def scores(self, x_TD: Tensor, call: RoutingCall) -> Tensor:
        """Return the scaled cosines; see `Router.scores`."""
        x_TP = linear_scores(x_TD, self.project_PD)
        dtype = x_TP.dtype
        x_TP = _directions(x_TP + self.project_P.to(dtype))
        direction_EP = F.normalize(self.direction_EP.to(dtype), dim=1)
        scale = self.temperature.to(dtype).clamp(max=MOST).exp()
        return self.noisy(F.linear(x_TP, direction_EP) * scale, call)


def _directions(y_TP: Tensor) -> Tensor:
    """Return `y / |y|`. Each row has length 1. Rows that are not longer than `SHORT` are replaced
    by zeros and have no gradient.
    """
    squared_T1 = y_TP.square().sum(1, keepdim=True)
    # Dividing by infinity gives zeros, and a gradient of zero instead of NaN.
    return y_TP / squared_T1.masked_fill(squared_T1 <= SHORT**2, math.inf).sqrt()
