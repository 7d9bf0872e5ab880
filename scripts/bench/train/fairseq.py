"""Build language models in fairseq's trainer: with our layer, with the layer of fairseq's `moe`
branch, and with dense layers.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_plugin.config import RunConfig
from moe_plugin.config.flags import setting_specs
from moe_plugin.experts.base import is_expert
from moe_plugin.layer import MoELayer
from scripts.bench.peers.base import copy
from scripts.bench.peers.fairseq_branch import BranchMoE
from scripts.bench.train import sides
from scripts.bench.train.sides import Settings, Side, TrainShape

NATIVE = "fairseq's moe branch"
_FIXED = ("--task dummy_lm --dict-size 256 --arch transformer_lm --decoder-attention-heads 4 "
          "--dropout 0 --attention-dropout 0 --share-decoder-input-output-embed "
          "--criterion moe_cross_entropy --moe-gate-loss-wt 0.01 --optimizer adam --lr 1e-3 "
          "--lr-scheduler fixed --clip-norm 1.0 --cpu --distributed-backend gloo "
          "--ddp-backend legacy_ddp --log-format none").split()


def import_host() -> None:
    from moe_plugin.hosts.fairseq import registered  # noqa: F401


def build(shape: TrainShape, text: Tensor, rank: int, ranks: int,
          ours: Mapping[str, Settings], others: bool, evaluate: bool = False) -> list[Side]:
    """Build all models with the same weights. See `run.sides_of`."""
    logging.getLogger("fairseq").setLevel(logging.ERROR)
    import_host()
    make = Models(shape, text, rank, ranks, evaluate)
    models = {(name, "ours"): make.model(shape.inner, [*make.experts, *flags_of(settings)])
              for name, settings in ours.items()}
    if others:
        models[NATIVE, "native"] = make.model(shape.inner, make.experts, _become_branch)
        models["dense", "dense"] = make.model(shape.inner * shape.top_k, [])
    first = next(iter(models.values())).get_model()
    for made in models.values():
        _copy_weights(first, made.get_model())
        # builds the optimizer, which copies the weights in 16 bits, so weights must be equal before
        made.begin_epoch(1)
    return [make.side(name, kind, made) for (name, kind), made in models.items()]


class _BranchFFN(nn.Module):
    """The layer of fairseq's `moe` branch, which replaces our layer.

    Attributes:
        moe: the attributes of an MoE layer that the trainer and the criterion read.
        run: the settings of the run.
        stats: always None, because no statistics are logged for this layer.
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
        """See `FairseqMoELayer`. The model has no padding tokens."""
        x_BTD = x_TBD.transpose(0, 1)
        y_SD, loss = self.branch(x_BTD.reshape(-1, x_BTD.shape[-1]))
        return y_SD.view(x_BTD.shape).transpose(0, 1), loss


def _become_branch(model: nn.Module, shape: TrainShape) -> None:
    from moe_plugin.hosts.fairseq.layers import moe_layers

    for layer in moe_layers(model):
        ours = layer.moe_layer.moe
        branch = BranchMoE(shape.width, shape.inner, shape.experts, shape.top_k, ours.comm,
                           F.gelu if shape.gelu else F.relu)
        layer.moe_layer = _BranchFFN(branch, ours, layer.moe_layer.run)


def _copy_weights(source: nn.Module, target: nn.Module) -> None:
    """Copy all weights. Parameters are matched by name, except for experts, which have different
    names in the two layers.
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


@torch.no_grad()
def _reload(optimizer: Any) -> None:
    """Copy the parameters to the optimizer's float32 copies, if it has any."""
    from moe_plugin.hosts.fairseq.compat.runtime import fp32_copies

    for parameter, wide in fp32_copies(optimizer):
        wide.copy_(parameter)


def flags_of(settings: Settings) -> list[str]:
    """Convert the settings to flags of fairseq's command line."""
    # A dispatcher that is set explicitly replaces the one that the flags of the moe branch select,
    # and with it the capacity. Set the capacity factor, unless the settings contain one.
    own = {"dispatch.capacity_factor": 1.0} if "dispatch.name" in settings else {}
    found = [word for name, text in _flag_texts({**own, **settings}).items()
             for word in ("--" + name.replace("_", "-"), text)]
    return [*found, sides.FUSED_ADAM] if sides.FUSED_ADAM in settings else found


def _flag_texts(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the flags that set the given settings, as command-line strings. This function is the
    inverse of `moe_plugin.config.flags.parse_value`.

    Settings without a flag are omitted.

    Args:
        settings: values by dotted path.
    Returns: The string to pass to each flag, by `FlagSpec.dest`.
    """
    specs = {spec.path: spec for spec in setting_specs()}
    return {specs[path].dest: _text(value) for path, value in settings.items() if path in specs}


def _text(value: Any) -> str:
    if value is None or value == {}:
        return "none"
    if isinstance(value, Mapping):
        return ",".join(f"{name}={weight}" for name, weight in value.items())
    return str(value).lower() if isinstance(value, bool) else str(value)


class Models:
    """Build several models of one shape in fairseq's trainer."""

    def __init__(self, shape: TrainShape, text: Tensor, rank: int, ranks: int,
                 evaluate: bool = False) -> None:
        self.shape, self.text, self.rank, self.ranks = shape, text, rank, ranks
        self.evaluate = evaluate
        self.sentences = shape.sentences(ranks)
        self.experts = ["--moe-freq", "1", "--moe-expert-count", str(shape.experts),
                        "--moe-second-expert-policy", "all",
                        "--moe-eval-capacity-token-fraction", "0"]  # the capacity of training
        self.experts += ["--moe-top1-expert"] if shape.top_k == 1 else []

    def model(self, inner: int, flags: list[str], change: Any = None) -> Any:
        """Return fairseq's trainer for one model, built from the flags of `fairseq-train`."""
        from omegaconf import open_dict

        from moe_plugin.hosts.fairseq.compat.names import (
            benchmark,  # noqa: F401 - registers the task
            convert_namespace_to_omegaconf,
            options,
            tasks,
            trainer,
        )

        shape = self.shape
        sizes = {
            "tokens-per-sample": shape.length, "decoder-embed-dim": shape.width,
            "decoder-input-dim": shape.width, "decoder-output-dim": shape.width,
            "decoder-ffn-embed-dim": inner, "decoder-layers": shape.layers,
            "batch-size": self.sentences, "distributed-world-size": self.ranks
        }
        given = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
        given += ["--bf16"] * shape.bf16 + ["--activation-fn", "gelu"] * shape.gelu
        parsed = options.parse_args_and_arch(options.get_training_parser(),
                                             input_args=[*_FIXED, *given, *flags])
        config = convert_namespace_to_omegaconf(parsed)
        with open_dict(config):
            config.distributed_training.distributed_rank = self.rank
        torch.manual_seed(1)
        task = tasks.setup_task(config.task)
        model = task.build_model(config.model)
        if change is not None:
            change(model, shape)
        return trainer.Trainer(config, task, model, task.build_criterion(config.criterion))

    def side(self, name: str, kind: str, made: Any) -> Side:
        from moe_plugin.hosts.fairseq.layers import moe_layers

        loss, reduced = [0.0], made.task.reduce_metrics

        def keep_loss(logs: Any, criterion: Any) -> None:
            # computed from the sums, because fairseq returns a loss rounded to three digits
            loss[0] = float(sum(log["inner_loss"] for log in logs)) / float(
                sum(log["sample_size"] for log in logs))
            reduced(logs, criterion)

        made.task.reduce_metrics = keep_loss

        def step(number: int) -> float:
            sample = self._sample(number)
            made.valid_step(sample) if self.evaluate else made.train_step([sample])
            return loss[0]

        found = moe_layers(made.get_model()) if kind == "ours" else []
        layers = [layer.moe_layer.moe for layer in found]
        tokens = self.sentences * self.shape.length
        settled = (lambda: True) if self.evaluate else sides.tuners_settled(layers)
        return Side(name, kind, step, [made.optimizer.optimizer], settled,
                    lambda: sides.layout_of(layers, tokens), list(made.get_model().parameters()),
                    [*(partial(sides.take_choices, layer) for layer in layers),
                     *(partial(setattr, m, "choose") for m in made.get_model().modules()
                       if isinstance(m, BranchMoE))], partial(_reload, made.optimizer))

    def _sample(self, number: int) -> dict[str, Any]:
        shape = self.shape
        first = 4  # number of special symbols before the first byte in fairseq's dictionary
        bytes_BT = sides.batch(self.text, number, self.sentences, shape.length, self.rank) + first
        return {
            "id": torch.arange(self.sentences), "nsentences": self.sentences,
            "ntokens": self.sentences * shape.length, "net_input": {
                "src_tokens": bytes_BT[:, :-1],
                "src_lengths": torch.full((self.sentences,), shape.length)
            }, "target": bytes_BT[:, 1:].contiguous()
        }
