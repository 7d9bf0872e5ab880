"""Routers, balance losses and capacity."""

from moe_plugin.routing.base import Router, finish_step
from moe_plugin.routing.base_layer import BASERouter
from moe_plugin.routing.cosine import CosineRouter
from moe_plugin.routing.dense_to_sparse import DenseToSparseRouter
from moe_plugin.routing.expert_choice import ExpertChoiceRouter
from moe_plugin.routing.gate_choice import GateCall, gate_choices
from moe_plugin.routing.gates import Gates, number_layers
from moe_plugin.routing.group_limited import GroupLimitedRouter
from moe_plugin.routing.gshard import GShardRouter
from moe_plugin.routing.hashing import HashRouter
from moe_plugin.routing.losses import LossInputs, losses
from moe_plugin.routing.noisy import NoisyTopKRouter
from moe_plugin.routing.prototypes import PrototypeRouter
from moe_plugin.routing.registry import build_router, routers
from moe_plugin.routing.sam import SAMRouter
from moe_plugin.routing.sigmoid_bias import SigmoidBiasRouter
from moe_plugin.routing.sinkhorn import SinkhornRouter
from moe_plugin.routing.switch import SwitchRouter
from moe_plugin.routing.ta_moe import TAMoERouter
from moe_plugin.routing.topk import TopKRouter
from moe_plugin.routing.topology_quota import TopologyQuotaRouter

__all__ = [
    "BASERouter", "CosineRouter", "DenseToSparseRouter", "ExpertChoiceRouter", "GShardRouter", "GateCall", "Gates", "GroupLimitedRouter", "HashRouter",
    "LossInputs", "NoisyTopKRouter", "PrototypeRouter", "Router", "SAMRouter", "SigmoidBiasRouter", "SinkhornRouter", "SwitchRouter",
    "TAMoERouter", "TopKRouter", "TopologyQuotaRouter", "build_router", "finish_step",
    "gate_choices", "losses", "number_layers", "routers",
]
