"""Replace the `MOELayer` of fairseq's own `moe` branch.

This module relies on the following interface of the branch (fairseq `moe`, since December 2021):
`fairseq.modules.moe.MOELayer(gate, experts, args, group=None, all2all_group=None)`. `gate.wg` is
the linear layer that computes the logits of the experts. `experts` contains the expert modules of
the current rank. Each expert module maps [rows, D] to [rows, D].
`forward(x, input_padding_mask=None)` returns `(output, l_aux)`. Versions that also have a
`CMRLayer` return `(output, {"moe_gate_loss": l_aux})` instead. The criterion reads the dict
`metadata` of every `MOELayer`. The branch imports only `moe_plugin.__init__`, the package of the
user directory.

This module also adds fused Adam and multi-tensor gradient functions to fairseq's optimizers.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import logging
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_plugin.comm import Comm, LocalComm
from moe_plugin.comm.host_collectives import comm_of
from moe_plugin.config import flatten, to_dict, with_overrides
from moe_plugin.config.flags import add_arguments, flag_specs
from moe_plugin.hosts.fairseq.compat.patching import (
    add_field,
    flag_metadata,
    patch,
    replaces,
    store_in_hydra,
)
from moe_plugin.hosts.fairseq.metrics import stats_metrics
from moe_plugin.hosts.fairseq.refusals import BRANCH
from moe_plugin.hosts.fairseq.translate import layer_config
from moe_plugin.layer import MoELayer
from moe_plugin.output import weighted_loss
from moe_plugin.training.gradients import fused

logger = logging.getLogger(__name__)


@patch
def fused_adam_flag() -> None:
    """Add the flag `--moe-fused-adam`, which makes fairseq's Adam use torch's fused kernels.

    In fairseq <= 0.12.3, fused Adam requires CUDA and apex.
    """
    from fairseq.optim.adam import FairseqAdamConfig

    add_field(FairseqAdamConfig, "moe_fused_adam", bool, False,
              "Adam with torch's fused kernels, on CPU and GPU, without apex; equal up to rounding")
    store_in_hydra("optimizer", "adam", FairseqAdamConfig)


@replaces("optim.adam.FairseqAdam.__init__")
def fused_adam(original: Callable[..., None], self: Any, cfg: Any, params: Any) -> None:
    """Select either fairseq's own Adam or this package's fused Adam. See `fused_adam_flag`."""
    from fairseq.optim import FairseqOptimizer

    params = list(params)
    # old checkpoints, and settings made by other code, may lack these fields
    half = getattr(cfg, "fp16_adam_stats", False)
    choice = fused.fairseq_adam(
        _dtypes(params), torch_fused=getattr(cfg, "moe_fused_adam", False),
        old=getattr(cfg, "use_old_adam", False), fp16_stats=half)
    logger.info("using the Adam of %s: %s", choice.active, choice.reason)
    if choice.active != "torch":
        original(self, cfg, params)
        return
    from moe_plugin.hosts.fairseq.adam import FusedAdam

    FairseqOptimizer.__init__(self, cfg)
    self._optimizer = FusedAdam(params, half=half, **self.optimizer_config)


def _dtypes(params: list[Any]) -> set[torch.dtype]:
    groups = [p["params"] if isinstance(p, dict) else [p] for p in params]
    return {parameter.dtype for group in groups for parameter in group}


@replaces("utils.clip_grad_norm_")
def clip_all_at_once(original: Callable[..., Tensor], params: Any, max_norm: float,
                     aggregate_norm_fn: Any = None) -> Tensor:
    """Clip all gradients in one operation. If no clipping is needed, the gradients are not changed.

    fairseq <= 0.12.3 launches one kernel for each parameter, even if the factor is 1.
    """
    params = [params] if isinstance(params, Tensor) else list(params)
    norm = original(params, 0, aggregate_norm_fn)
    if max_norm > 0:
        # reading the value costs no extra wait, because fairseq's trainer reads the norm anyway;
        # `not factor >= 1` is also true for NaN, so NaN reaches all gradients
        factor = float((float(max_norm) / (norm + 1e-6)).clamp(max=1))
        if not factor >= 1:
            fused.scale_([p.grad for p in params if p.grad is not None], factor)
    return norm


@replaces("optim.FairseqOptimizer.multiply_grads")
def scale_all_at_once(_: Any, self: Any, c: float | Tensor) -> None:
    """Scale all gradients at once. fairseq <= 0.12.3 launches one kernel for each parameter."""
    fused.scale_([p.grad for p in self.params if p.grad is not None], c)


# arguments of later versions of the branch's layer that would change the result; must be 0 here
_DROPS = {"tok_dropout": "--moe-eom", "moe_local_drop": "--moe-local-drop"}


def native_module() -> ModuleType | None:
    """Return the module `fairseq.modules.moe` of the `moe` branch, or None if it does not exist."""
    if "fairseq.modules.moe" in sys.modules:
        return sys.modules["fairseq.modules.moe"]
    if importlib.util.find_spec("fairseq.modules.moe") is None:
        return None
    return importlib.import_module("fairseq.modules.moe")


def swap_native(module: ModuleType) -> type:
    """Replace `MOELayer` in the `moe` branch, and in all fairseq modules that have imported the
    class by name.

    This function is needed only for fairseq's `moe` branch, which has no registry for layers. The
    new class is a subclass of the original class, so that `isinstance` checks still pass.

    Returns: the class that replaces `MOELayer`.
    """
    native = module.MOELayer
    if getattr(native, "_moe_plugin", False):
        return native
    ours = type("MOELayer", (_SwappedLayer, native),
                {"_moe_plugin": True, "__module__": native.__module__,
                 # only the presence of CMRLayer shows which version of the branch this is
                 "_loss_by_name": hasattr(module, "CMRLayer")})
    loaded: Any
    for name, loaded in list(sys.modules.items()):
        if name.split(".")[0] in ("fairseq", "fairseq_cli") and getattr(loaded, "MOELayer",
                                                                        None) is native:
            loaded.MOELayer = ours
    module.MOELayer = ours  # type: ignore[attr-defined]
    logger.info("moe-plugin's layer replaces %s.MOELayer; its settings are the --moe-... flags of "
                "docs/config.md", module.__name__)
    return ours


def add_flags() -> None:
    """Add this package's flags to the models of the `moe` branch that have experts.

    Flags that the branch itself defines keep their meaning.
    """
    from fairseq import models

    for name, settings in models.MODEL_DATACLASS_REGISTRY.items():
        if settings is not None and "moe_expert_count" in settings.__dataclass_fields__:
            for spec in flag_specs():
                add_field(settings, spec.dest, Optional[str], None,  # noqa: UP045
                          **flag_metadata(spec))
            store_in_hydra("model", name, settings)
    transformer = models.MODEL_REGISTRY.get("transformer")
    if transformer is not None and models.MODEL_DATACLASS_REGISTRY.get("transformer") is None:
        _add_to_parser(transformer)


def _add_to_parser(model: Any) -> None:
    original = model.add_args

    def add_args(parser: argparse.ArgumentParser) -> None:
        original(parser)
        existing = {action.dest for action in parser._actions}
        add_arguments(parser, {spec.path for spec in flag_specs() if spec.dest in existing})

    model.add_args = staticmethod(add_args)


class _SwappedLayer(nn.Module):
    """A replacement for the layer of the `moe` branch that calls this package's layer.

    The constructor arguments and the parameter names are those of the original class.
    """

    _loss_by_name = False

    def __init__(self, gate: nn.Module, experts: Any, args: Any, group: Any = None,
                 all2all_group: Any = None, max_positions: Any = None,
                 init_model_on_gpu: bool = False, **drops: float) -> None:
        nn.Module.__init__(self)
        for name, share in drops.items():
            if share:
                raise ValueError(f"moe-plugin's layer does not support {name}={share}. Leave "
                                 f"{_DROPS.get(name, name)} out")
        self.gate, self.args = gate, args
        self.experts = experts if isinstance(experts, nn.ModuleList) else nn.ModuleList([experts])
        self.expert_group, self.all2all_group = group, all2all_group
        self.metadata: dict[str, Any] = {}
        comm = _comm(all2all_group, args)
        weight_ED = gate.get_parameter("wg.weight")
        # the branch's expert modules contain their own dropout
        config = with_overrides(
            layer_config(args, model_dim=weight_ED.shape[1], ffn_dim=4 * weight_ED.shape[1],
                         activation="gelu"), {"experts.dropout": 0.0})
        first = comm.rank * len(self.experts)
        layer = MoELayer(config, comm, experts=lambda index: self.experts[index - first])
        _check_router(layer)
        layer.router.weight_ED = weight_ED
        # stored outside of the submodules, so that checkpoints contain only the branch's names
        self.__dict__["layer"] = layer

    def forward(self, *inputs: Tensor, input_padding_mask: Tensor | None = None,
                **_: Any) -> tuple[Tensor, Any]:
        """Return a tuple of the output [B, T, D] and the gate loss.
        input_padding_mask: bool tensor [B, T] that is True for padding tokens.
        """
        layer = self.layer
        assert isinstance(layer, MoELayer)
        layer.train(self.training)
        mask_BT = None if input_padding_mask is None else ~input_padding_mask.bool()
        out = layer(inputs[0], mask_BT)
        loss = weighted_loss(out.losses, layer.config.losses)
        self.metadata = {
            **(stats_metrics(out.stats) if out.stats is not None else {}), "moe_gate_loss": loss.
            detach()
        }
        return out.output, {"moe_gate_loss": loss} if self._loss_by_name else loss


def _check_router(layer: MoELayer) -> None:
    names = [name for name, _ in layer.router.named_parameters()]
    BRANCH.refuse({**flatten(to_dict(layer.config)), "other_router": names != ["weight_ED"]})


def _comm(group: Any, args: Any) -> Comm:
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return LocalComm()
    if group is None:
        from fairseq.distributed import utils

        group = utils.get_all2all_group(args.moe_expert_count)
    return comm_of(group)
