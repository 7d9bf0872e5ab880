"""Routers, balance losses and capacity."""

from moe_plugin.kernels.score_functions import ScoreFunction, score_functions
from moe_plugin.routing import registry
from moe_plugin.routing.call import RoutingCall
from moe_plugin.routing.contract import (
    HasFinishStep,
    RouterModule,
    finish_step,
    finish_step_of_any,
    needs_of,
)
from moe_plugin.routing.losses import losses
from moe_plugin.routing.registry import build_router, layer_router, only_read
from moe_plugin.routing.router_selection import SelectionCall, router_selections
from moe_plugin.routing.routers.base import Router
from moe_plugin.routing.routers.base_layer import BASERouter
from moe_plugin.routing.routers.cosine import CosineRouter
from moe_plugin.routing.routers.dense_to_sparse import DenseToSparseRouter
from moe_plugin.routing.routers.expert_choice import ExpertChoiceRouter
from moe_plugin.routing.routers.group_limited import GroupLimitedRouter
from moe_plugin.routing.routers.gshard import GShardRouter
from moe_plugin.routing.routers.hashing import HashRouter
from moe_plugin.routing.routers.noisy import NoisyTopKRouter
from moe_plugin.routing.routers.prototypes import PrototypeRouter
from moe_plugin.routing.routers.sam import SAMRouter
from moe_plugin.routing.routers.sigmoid_bias import SigmoidBiasRouter
from moe_plugin.routing.routers.sinkhorn import SinkhornRouter
from moe_plugin.routing.routers.switch import SwitchRouter
from moe_plugin.routing.routers.ta_moe import TAMoERouter
from moe_plugin.routing.routers.topk import TopKRouter
from moe_plugin.routing.routers.topology_quota import TopologyQuotaRouter
from moe_plugin.routing.several_routers import RouterSelector, number_layers

routers = registry.routers  # the registry; the package of this name holds its members

__all__ = [
    "BASERouter", "CosineRouter", "DenseToSparseRouter", "ExpertChoiceRouter", "GShardRouter",
    "GroupLimitedRouter", "HasFinishStep", "HashRouter", "NoisyTopKRouter", "PrototypeRouter",
    "Router", "RouterModule", "RouterSelector", "RoutingCall", "SAMRouter", "ScoreFunction",
    "SelectionCall", "SigmoidBiasRouter", "SinkhornRouter", "SwitchRouter", "TAMoERouter",
    "TopKRouter", "TopologyQuotaRouter", "build_router", "finish_step", "finish_step_of_any",
    "layer_router", "losses", "needs_of", "number_layers", "only_read", "router_selections",
    "routers", "score_functions",
]
