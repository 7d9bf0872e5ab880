"""A GPT in Megatron-core with our layer, with its own in either dispatcher, and without experts."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from moe_plugin.hosts.megatron.trainer import arguments
from moe_plugin.lab.bench.peers.base import copy
from moe_plugin.lab.bench.train.shapes import TrainShape
from moe_plugin.lab.bench.train.sides import FUSED_ADAM, Settings, layout_of, tuners_settled
from moe_plugin.lab.bench.train.steps import Side, batch

DISPATCHERS = ("alltoall", "allgather")
_FIXED = ("--train-iters 1 --lr 1e-3 --lr-decay-style constant --data-path none --cpu "
          "--hidden-dropout 0 --attention-dropout 0 --disable-bias-linear --moe-router-dtype fp32 "
          "--moe-aux-loss-coeff 0.01 --num-attention-heads 4").split()


def build(shape: TrainShape, text: Tensor, rank: int, ranks: int,
          ours: Mapping[str, Settings], others: bool) -> list[Side]:
    """All models with equal weights, in Megatron's groups; the process group must exist.

    Args:
        text: uint8 [N], what they train on.
        ours: settings of our layer by the side's name.
        others: Megatron's own layer and a dense one, too.
    """
    from moe_plugin.hosts.megatron.trainer import train

    args = _arguments(shape, ranks)
    train.start(args)
    source = _Source(shape, text, rank, ranks)
    first, sides = None, []
    for name, settings in ours.items():
        fused = _changed(args, moe_fused_adam=FUSED_ADAM in settings)
        made = _make(fused, {name: value for name, value in settings.items() if name != FUSED_ADAM})
        first = first or made
        sides.append(_side(name, "ours", made, fused, source))
        _copy_weights(first, made)
    if not others:
        return sides
    for name in DISPATCHERS:
        native = _changed(args, native_moe=True, moe_token_dispatcher_type=name)
        made = _make(native, {})
        sides.append(_side(f"Megatron, {name}", "native", made, native, source))
        _copy_weights(first, made)
    dense = _changed(args, num_experts=None, ffn_hidden_size=shape.inner * shape.top_k)
    made = _make(dense, {})
    _copy_weights(first, made)
    return [*sides, _side("dense", "dense", made, dense, source)]


def _arguments(shape: TrainShape, ranks: int) -> argparse.Namespace:
    values = {
        "num-layers": shape.layers, "hidden-size": shape.width, "seq-length": shape.length,
        "micro-batch-size": shape.sentences(ranks), "num-experts": shape.experts,
        "moe-ffn-hidden-size": shape.inner, "moe-router-topk": shape.top_k,
        "expert-model-parallel-size": ranks
    }
    given = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    # Megatron normalises the weights of a single choice to 1 unless it scores before choosing
    single = ["--moe-router-pre-softmax"] if shape.top_k == 1 else []
    return arguments.parser().parse_args([*_FIXED, *given, *single])


def _changed(args: argparse.Namespace, **values: Any) -> argparse.Namespace:
    return argparse.Namespace(**{**vars(args), **values})


def _make(args: argparse.Namespace, settings: Settings) -> Any:
    from moe_plugin.hosts.megatron.trainer import model
    from moe_plugin.hosts.megatron.trainer.data import BYTE_VOCABULARY
    from moe_plugin.hosts.megatron.trainer.train import seed_everything

    seed_everything(args.seed)
    config = arguments.transformer_config(args, cpu=True)
    return model.build(args, config, dict(settings), BYTE_VOCABULARY)


class _Source:
    """Batches by number."""

    def __init__(self, shape: TrainShape, text: Tensor, rank: int, ranks: int) -> None:
        self.text, self.rank, self.length = text, rank, shape.length
        self.sentences = shape.sentences(ranks)

    def __call__(self, number: int) -> Any:
        from moe_plugin.hosts.megatron.trainer.data import Batch

        bytes_BT = batch(self.text, number, self.sentences, self.length, self.rank)
        positions_BT = torch.arange(self.length).expand(self.sentences, -1)
        return Batch(bytes_BT[:, :-1], bytes_BT[:, 1:],
                     torch.ones(self.sentences, self.length), positions_BT)


def _side(name: str, kind: str, made: Any, args: argparse.Namespace, source: _Source) -> Side:
    from moe_plugin.hosts.megatron.compat.optimizer import parts
    from moe_plugin.hosts.megatron.trainer.loop import Loop

    loop = Loop(args, made, None, None, None)

    def step(number: int) -> float:
        loss_2, _ = loop.step([iter([source(number)])], args.lr)
        return float(loss_2[0] / loss_2[1])

    layers = [layer.moe for layer in made.moe_layers()]
    optimizers = [part.optimizer for part in parts(made.optimizer) if part.optimizer is not None]
    return Side(name, kind, step, optimizers, tuners_settled(layers), lambda: layout_of(layers))


def _copy_weights(source: Any, target: Any) -> None:
    """Equal weights: parameters of one name, and experts, whose names differ."""
    if source is target:
        return
    for mine, theirs in zip(source.bare(), target.bare(), strict=True):
        known = dict(mine.named_parameters())
        for name, parameter in theirs.named_parameters():
            if name in known and known[name].shape == parameter.shape:
                copy(parameter, known[name])
        native = [m for m in theirs.modules() if _is_native(m)]
        for layer, other in zip(source.moe_layers(), native, strict=bool(native)):
            _copy_experts(layer, other)


def _is_native(module: nn.Module) -> bool:
    from moe_plugin.hosts.megatron.compat import core
    from moe_plugin.hosts.megatron.layer import PluginMoELayer

    return isinstance(module, core.MoELayer) and not isinstance(module, PluginMoELayer)


def _copy_experts(layer: Any, native: Any) -> None:
    copy(native.router.weight, layer.router.weight_ED)
    for number, module in enumerate(native.experts.local_experts):
        copy(module.linear_fc1.weight, layer.experts.w_in_LDF[number].t())
        copy(module.linear_fc2.weight, layer.experts.w_out_LFD[number].t())
