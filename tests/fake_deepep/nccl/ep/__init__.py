"""A stand-in for `nccl.ep` of nccl4py 0.3.1 over torch.distributed on a CPU: its published
interface, of the high-throughput algorithm in layout FLAT alone.
"""

from nccl.ep.handle import (
    Algorithm,
    CombineConfig,
    CombineInputs,
    CombineOutputs,
    DispatchConfig,
    DispatchInputs,
    DispatchOutputs,
    Group,
    GroupConfig,
    Handle,
    Layout,
    LayoutInfo,
    PassDir,
    Tensor,
)

__all__ = ["Algorithm", "CombineConfig", "CombineInputs", "CombineOutputs", "DispatchConfig",
           "DispatchInputs", "DispatchOutputs", "Group", "GroupConfig", "Handle", "Layout",
           "LayoutInfo", "PassDir", "Tensor"]
