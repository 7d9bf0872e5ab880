"""Groups of ranks and their collectives. A group can be real (torch.distributed), simulated with
threads, or contain a single rank.
"""

from moe_plugin.comm.algorithms import algorithms
from moe_plugin.comm.base import Comm, CommError, LocalComm
from moe_plugin.comm.exchange import Exchange
from moe_plugin.comm.simulated import SimulatedComm, Traffic, run_simulated
from moe_plugin.comm.topology import Topology
from moe_plugin.comm.torch_comm import TorchComm, default_comm

__all__ = [
    "Comm", "CommError", "Exchange", "LocalComm", "SimulatedComm", "Topology", "TorchComm",
    "Traffic", "algorithms", "default_comm", "run_simulated"
]
