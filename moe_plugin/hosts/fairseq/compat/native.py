"""Inside fairseq's own `moe` branch: its `MOELayer` is swapped for ours, everything else of the
branch stays.

Interface assumed of the branch (fairseq `moe`, December 2021):
`fairseq.modules.moe.MOELayer(gate, experts, args, group=None, all2all_group=None)`; `gate.wg` is
the linear map to experts; `experts` are this rank's modules, [rows, D] to [rows, D];
`forward(x, input_padding_mask=None)` returns `(output, l_aux)`; its criterion reads the dict
`metadata` of every `MOELayer`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from moe_plugin.comm import Comm, LocalComm, TorchComm
from moe_plugin.hosts.fairseq.metrics import stats_metrics
from moe_plugin.hosts.fairseq.translate import layer_config
from moe_plugin.layer import MoELayer
from moe_plugin.records import weighted_loss


def native_module() -> ModuleType | None:
    """The branch's `fairseq.modules.moe`; None in a fairseq without it."""
    if "fairseq.modules.moe" in sys.modules:
        return sys.modules["fairseq.modules.moe"]
    if importlib.util.find_spec("fairseq.modules.moe") is None:
        return None
    return importlib.import_module("fairseq.modules.moe")


def swap_native(module: ModuleType) -> type:
    """Replace `MOELayer` in the branch's module and wherever fairseq imported it by name.

    Returns the replacement.

    fairseq `moe` branch only: it has no registry for layers. The replacement is a subclass, so
    `isinstance` still holds.
    """
    native = module.MOELayer
    if getattr(native, "_moe_plugin", False):
        return native
    ours = type("MOELayer", (_SwappedLayer, native),
                {"_moe_plugin": True, "__module__": native.__module__})
    for name, loaded in list(sys.modules.items()):
        if name.split(".")[0] in ("fairseq", "fairseq_cli") and getattr(loaded, "MOELayer",
                                                                        None) is native:
            loaded.MOELayer = ours
    module.MOELayer = ours
    return ours


class _SwappedLayer(nn.Module):
    """The branch's layer as seen from outside: same arguments, same parameters under the same
    names, our path inside.
    """

    def __init__(self, gate: nn.Module, experts: Any, args: Any, group: Any = None,
                 all2all_group: Any = None) -> None:
        nn.Module.__init__(self)
        self.gate, self.args = gate, args
        self.experts = experts if isinstance(experts, nn.ModuleList) else nn.ModuleList([experts])
        self.expert_group, self.all2all_group = group, all2all_group
        self.metadata: dict[str, Any] = {}
        comm = _comm(all2all_group, args)
        weight_ED = gate.wg.weight
        config = layer_config(args, model_dim=weight_ED.shape[1], ffn_dim=4 * weight_ED.shape[1],
                              activation="gelu")
        first = comm.rank * len(self.experts)
        layer = MoELayer(config, comm, experts=lambda index: self.experts[index - first])
        layer.router.weight_ED = weight_ED
        # not a sub-module: the branch's checkpoint code knows the parameters by their native names
        self.__dict__["_layer"] = layer

    def forward(self, *inputs: Tensor, input_padding_mask: Tensor | None = None,
                **_: Any) -> tuple[Tensor, Tensor]:
        """[B, T, D] to ([B, T, D], gate loss). input_padding_mask: [B, T], True = padding."""
        layer: MoELayer = self.__dict__["_layer"]
        layer.train(self.training)
        mask_BT = None if input_padding_mask is None else ~input_padding_mask.bool()
        out = layer(inputs[0], mask_BT)
        loss = weighted_loss(out.losses, layer.config.losses)
        self.metadata = {
            **(stats_metrics(out.stats) if out.stats is not None else {}), "moe_gate_loss": loss.
            detach()
        }
        return out.output, loss


def _comm(group: Any, args: Any) -> Comm:
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return LocalComm()
    if group is None:
        from fairseq.distributed import utils

        group = utils.get_all2all_group(args.moe_expert_count)
    return TorchComm(group) if dist.get_world_size(group) > 1 else LocalComm()
