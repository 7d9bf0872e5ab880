"""Routers, balance losses and expert capacity."""

from moe_plugin.kernels.scores import ScoreFunction, score_functions
from moe_plugin.routing import registry
from moe_plugin.routing.call import RoutingCall
from moe_plugin.routing.contract import (
    HasFinishStep,
    RouterModule,
    finish_step,
    finish_step_of_any,
    forget_step,
    needs_of,
)
from moe_plugin.routing.losses import declares, losses
from moe_plugin.routing.registry import build_router, layer_router, only_read
from moe_plugin.routing.routers.balanced import BASERouter, ExpertChoiceRouter, SinkhornRouter
from moe_plugin.routing.routers.base import Router
from moe_plugin.routing.routers.by_links import TAMoERouter, TopologyQuotaRouter
from moe_plugin.routing.routers.groups_and_biases import (
    GroupLimitedRouter,
    QuantileRouter,
    SAMRouter,
    SigmoidBiasRouter,
    SoftmaxBiasRouter,
)
from moe_plugin.routing.routers.hashing import HashRouter
from moe_plugin.routing.routers.noisy import DenseToSparseRouter, NoisyTopKRouter, SparseMixerRouter
from moe_plugin.routing.routers.prototypes import PrototypeRouter
from moe_plugin.routing.routers.topk import CosineRouter, GShardRouter, SwitchRouter, TopKRouter
from moe_plugin.routing.several_routers import (
    RouterSelector,
    SelectionCall,
    number_layers,
    router_selections,
)

# This assignment shadows the subpackage `routing.routers`, which contains the registered classes.
routers = registry.routers

__all__ = [
    "BASERouter", "CosineRouter", "DenseToSparseRouter", "ExpertChoiceRouter", "GShardRouter",
    "GroupLimitedRouter", "HasFinishStep", "HashRouter", "NoisyTopKRouter", "PrototypeRouter",
    "QuantileRouter", "Router", "RouterModule", "RouterSelector", "RoutingCall", "SAMRouter",
    "ScoreFunction", "SelectionCall", "SigmoidBiasRouter", "SinkhornRouter", "SoftmaxBiasRouter",
    "SparseMixerRouter", "SwitchRouter", "TAMoERouter", "TopKRouter", "TopologyQuotaRouter",
    "build_router", "declares", "finish_step", "finish_step_of_any", "forget_step",
    "layer_router", "losses", "needs_of", "number_layers", "only_read", "router_selections",
    "routers", "score_functions",
]
