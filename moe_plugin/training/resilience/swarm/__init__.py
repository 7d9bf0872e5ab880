"""Pipeline parallelism over peers of unequal speed that may join or leave at any time (SWARM)."""

from moe_plugin.training.resilience.swarm.journeys import JoinedTrainer
from moe_plugin.training.resilience.swarm.messages import SwarmStep
from moe_plugin.training.resilience.swarm.peer import StagePeer
from moe_plugin.training.resilience.swarm.stage import make_stage
from moe_plugin.training.resilience.swarm.trainer import Swarm

__all__ = ["JoinedTrainer", "StagePeer", "Swarm", "SwarmStep", "make_stage"]
