"""Language models in fairseq's trainer: with our layer, with the layer of the moe branch, and
dense.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from moe_plugin.config import RunConfig
from moe_plugin.experts.base import is_expert
from moe_plugin.layer import MoELayer
from scripts.bench.peers.base import copy
from scripts.bench.peers.fairseq_branch import BranchMoE
from scripts.bench.train.host_fairseq import Models, start
from scripts.bench.train.host_sides import Settings, Side, TrainShape

NATIVE = "fairseq's moe branch"


def build(shape: TrainShape, text: Tensor, rank: int, ranks: int,
          ours: Mapping[str, Settings], others: bool, evaluate: bool = False) -> list[Side]:
    """Build all models with equal weights. The default process group must exist.

    Args:
        shape: sizes of the models.
        text: the text that the models train on, uint8 [N].
        rank: this rank.
        ranks: number of ranks.
        ours: settings of our layer by the name of the side.
        others: whether to build the layer of fairseq's moe branch and a dense model too.
        evaluate: whether steps are forward passes of an evaluation.
    """
    start()
    make = Models(shape, text, rank, ranks, evaluate)
    models = {(name, "ours"): make.ours(settings)
              for name, settings in ours.items()}
    if others:
        models[NATIVE, "native"] = make.model(shape.inner, make.experts, _become_branch)
        models["dense", "dense"] = make.model(shape.inner * shape.top_k, [])
    first = next(iter(models.values())).get_model()
    for made in models.values():
        _copy_weights(first, made.get_model())
        # builds the optimizer, which copies the weights in 16 bits, so weights must be equal before
        made.begin_epoch(1)
    return [_side(make, name, kind, made) for (name, kind), made in models.items()]


def _side(make: Models, name: str, kind: str, made: Any) -> Side:
    """Build a side that also includes the routers of the branch's layers."""
    side = make.side(name, kind, made)
    return replace(side, routers=[*side.routers, *(
        partial(setattr, m, "choose") for m in made.get_model().modules()
        if isinstance(m, BranchMoE))])


class _BranchFFN(nn.Module):
    """The layer of fairseq's moe branch in the place of ours.

    Attributes:
        moe: the attributes of a layer that the trainer and the criterion read.
        run: the run's settings.
        stats: None, because nothing is logged about this layer.
    """

    stats = None

    def __init__(self, branch: BranchMoE, ours: MoELayer, run: RunConfig) -> None:
        super().__init__()
        self.run = run
        self.branch, factor = branch, 1 / branch.comm.size
        self.moe = SimpleNamespace(config=ours.config, comm=branch.comm, router=ours.router)
        for parameter in branch.parameters():
            if is_expert(parameter):
                parameter.register_hook(lambda gradient: gradient * factor)

    def forward(self, x_TBD: Tensor, padding_BT: Tensor | None) -> tuple[Tensor, Tensor]:
        """See `FairseqMoELayer`. No token is padding here."""
        x_BTD = x_TBD.transpose(0, 1)
        y_SD, loss = self.branch(x_BTD.reshape(-1, x_BTD.shape[-1]))
        return y_SD.view(x_BTD.shape).transpose(0, 1), loss


def _become_branch(model: nn.Module, shape: TrainShape) -> None:
    from moe_plugin.hosts.fairseq.layers import moe_layers

    for layer in moe_layers(model):
        ours = layer.moe_layer.moe
        branch = BranchMoE(shape.width, shape.inner, shape.experts, shape.top_k, ours.comm)
        layer.moe_layer = _BranchFFN(branch, ours, layer.moe_layer.run)


def _copy_weights(source: nn.Module, target: nn.Module) -> None:
    """Copy all weights: parameters by name, and experts, which have different names in the two
    layers.
    """
    from moe_plugin.hosts.fairseq.layers import moe_layers

    known = dict(source.named_parameters())
    for name, parameter in target.named_parameters():
        if name in known and known[name].shape == parameter.shape and known[name] is not parameter:
            copy(parameter, known[name])
    for mine, theirs in zip(moe_layers(source), moe_layers(target), strict=False):
        if isinstance(theirs.moe_layer, _BranchFFN):
            _copy_experts(mine.moe_layer.moe, theirs.moe_layer.branch)


def _copy_experts(ours: Any, branch: BranchMoE) -> None:
    copy(branch.gate.weight, ours.router.weight_ED)
    for number, (first, second) in enumerate(branch.experts):
        copy(first.weight, ours.experts.w_in_LDF[number].t())
        copy(second.weight, ours.experts.w_out_LFD[number].t())
        copy(first.bias, ours.experts.bias_in_LF[number])
        copy(second.bias, ours.experts.bias_out_LD[number])
