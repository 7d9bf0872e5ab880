"""Support for `--weights-on host`, which trains a fairseq language model on one device while its
weights are stored in host memory.

Each part of the model is a block of a `StreamedTrainer`. The parts are the embedding, each decoder
layer, and the output layer. fairseq passes all batches of an update to the trainer at once
(`--update-freq`). Because of this, each part can compute all batches before the next part starts.
The loss and the logged statistics of each batch are the same as those that fairseq's own task
computes. Checkpoints have the same format as fairseq's checkpoints.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moe_plugin.hosts.fairseq.adam import BlockOptimizers, FairseqNorm, in_16_bits, memory_efficient
from moe_plugin.hosts.fairseq.compat.names import FairseqTask, build_optimizer, utils
from moe_plugin.hosts.fairseq.compat.patching import Overlay
from moe_plugin.hosts.fairseq.layers import moe_layers, run_settings
from moe_plugin.hosts.fairseq.models import MoETransformerLanguageModel
from moe_plugin.hosts.fairseq.refusals import STREAMED, values_of
from moe_plugin.memory.tiers import DiskTier, tier_of
from moe_plugin.memory.weights.files import SegmentsOnce
from moe_plugin.memory.weights.streamed import StreamedTrainer
from moe_plugin.output import LayerStats
from moe_plugin.planner.units import parse_size
from moe_plugin.utils.replaced import replaced

logger = logging.getLogger(__name__)
Given = tuple[dict[str, Any], bool]  # a batch on the device, and whether it is a dummy to ignore
Numbers = tuple[Tensor, Any, dict[str, Any]]  # loss, sample size, values to log


@dataclass
class _Call:
    """State of one batch during a step.

    Attributes:
        sample: the batch.
        ignored: True if the batch is a dummy.
        tokens: token ids [B, T], which are the input of the embedding.
        gates: dict of the gate losses that the MoE layers computed in the first pass.
        stats: dict of the statistics that the MoE layers computed in the first pass.
        slopes: dict of copies of the gate losses. The criterion reads these copies. The gradients
            of the copies are the gradients of the loss with respect to the gate losses.
        numbers: values that the criterion returned for this batch.
    """

    sample: dict[str, Any]
    ignored: bool
    tokens: Tensor
    gates: dict[Any, Tensor] = field(default_factory=dict)
    stats: dict[Any, LayerStats | None] = field(default_factory=dict)
    slopes: dict[Any, Tensor] = field(default_factory=dict)
    numbers: Numbers | None = None


class DecoderPart(nn.Module):
    """A block that computes one part of the decoder.

    The input of a part is the output [B, T, D] of the previous part. The first part, the embedding,
    receives the token ids [B, T]. The output of a part has shape [B, T, D]. The last part returns
    logits instead.

    Args:
        decoder: the complete decoder. For each part, the decoder's forward pass is run with only
            the modules of this part.
        number: index of the part. Part 0 is the embedding. The decoder layers have the next
            numbers, and the output layer is the last part.
        call: function that returns the state of the current batch.
    """

    def __init__(self, decoder: Any, number: int, call: Callable[[], _Call]) -> None:
        super().__init__()
        layers = decoder.layers
        self.first, self.last = number == 0, number == len(layers) + 1
        stage_layers = [] if self.first or self.last else [layers[number - 1]]
        [self.layer] = stage_layers or [None]
        for name in _names(decoder, self.first) if not stage_layers else ():
            setattr(self, name, getattr(decoder, name))
        # only the last layer returns its attention, as in the whole decoder
        names: dict[str, Any] = {"layers": stage_layers, "num_layers": int(number == len(layers))}
        if not self.first:
            names |= {"embed_scale": 1.0, "embed_positions": None, "quant_noise": None,
                      "project_in_dim": None, "layernorm_embedding": None,
                      "dropout_module": lambda x: x}
        if not self.last:
            names |= {"layer_norm": None, "project_out_dim": None}
        self._features = partial(_features, decoder, names)
        self._output, self._call = decoder.output_layer, call

    def forward(self, x: Tensor) -> Any:
        """Compute this part. In the second pass, an MoE layer also returns its gate loss times the
        gradient of the loss with respect to it.
        """
        call, moe = self._call(), self.layer if self.layer in moe_layers(self) else None
        if moe is not None:
            moe.moe_layer.tokens_BT, moe.moe_layer.ignored = call.tokens, call.ignored
        y = self._features(x, call.tokens, self.first)
        if self.last:
            return self._output(y)
        if moe is None:
            return y
        gate, moe.gate_loss = moe.gate_loss, None
        if not torch.is_grad_enabled():
            call.gates[moe], call.stats[moe] = gate.detach(), moe.moe_layer.stats
            return y
        slope = call.slopes[moe].grad
        return y if slope is None else (y, gate * slope)


def _names(decoder: Any, first: bool) -> list[str]:
    """Return the names of the modules that the decoder runs before its layers (if `first` is True)
    or after its layers.

    Modules that share their weight with the embedding are left out.
    """
    names = [name for name, _ in decoder.named_children()]
    at = names.index("layers")
    if first:
        return names[:at]
    tied = {id(p) for p in decoder.embed_tokens.parameters()}
    return [name for name in names[at + 1:]
            if not tied & {id(p) for p in getattr(decoder, name).parameters()}]


def _features(decoder: Any, names: Mapping[str, Any], x: Tensor, tokens: Tensor,
              first: bool) -> Tensor:
    embed = {} if first else {"embed_tokens": lambda _: x}
    part = Overlay(decoder, **names, **embed)
    return type(decoder).extract_features_scriptable(part, tokens, None)[0]


class StreamedLanguageModel:
    """A fairseq language model with streamed weights, which implements the interface that fairseq's
    trainer expects.

    Args:
        cfg: settings that were passed to fairseq's trainer.
        task: task that was passed to fairseq's trainer.
        model: model that was passed to fairseq's trainer. The weights are moved out of the model.
        criterion: criterion that was passed to fairseq's trainer.

    Attributes:
        trainer: the `StreamedTrainer` that runs the parts.
        optimizer: a fairseq optimizer for all parts together. In 16-bit training, the optimizer is
            wrapped in fairseq's 16-bit optimizer.
        whole: object that reads and writes all weights, for checkpoints.
        task: fairseq's task with the steps of this class instead of its own steps.
    Raises:
        ValueError: If a setting cannot be used together with streamed weights.
        TierError: If the storage tier is too small for the weights of the model.
    """

    def __init__(self, cfg: Any, task: Any, model: Any, criterion: Any) -> None:
        check(cfg, task, model, criterion)
        self.model, self.criterion = model, criterion
        self._calls: list[_Call] = []
        self._given: Sequence[Given] = ()
        self._numbers: Iterator[Numbers] = iter(())
        self._cfg = cfg.optimizer
        self._kind: Any = BlockOptimizers
        offload, decoder = run_settings(model).offload, model.decoder
        on_gpu = torch.cuda.is_available() and not cfg.common.cpu
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device(
            "cpu")
        limit = None if offload.weights_memory is None else parse_size(offload.weights_memory)
        common, shared = cfg.common, decoder.share_input_output_embed
        halves = common.fp16 or common.bf16
        if halves:  # fairseq's trainer does this too, but only later
            model.half() if common.fp16 else model.to(dtype=torch.bfloat16)
        self.trainer = StreamedTrainer(
            [DecoderPart(decoder, i, lambda: self._calls[self.trainer.micro_batch])
             for i in range(len(decoder.layers) + 2)],
            self._loss, self._optimizer, tier_of(device, offload.path), device=device, limit=limit,
            seed=cfg.common.seed, resident=[0] if shared else [],
            clip=FairseqNorm(0 if halves else cfg.optimization.clip_norm,
                             None if halves else self._size),
            main_weights=halves and not memory_efficient(cfg))
        segments = SegmentsOnce(self.trainer, logger)
        self.blocks = self._kind(cfg.optimizer, self.trainer, lambda: segments(len(self._given)))
        self.optimizer = in_16_bits(cfg, self.blocks) if halves else self.blocks
        self._scaler = getattr(self.optimizer, "scaler", None)
        self.whole = Overlay(model, state_dict=self.state_dict,
                             load_state_dict=self.load_state_dict)
        self.task = Overlay(task, train_step=self.train_step, valid_step=self.valid_step)

    def _optimizer(self, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        built = build_optimizer(self._cfg, params)
        # fairseq compares this name with the one in a checkpoint, which the ordinary optimizer of
        # a whole model may have written
        self._kind = type(type(built).__name__, (BlockOptimizers,), {
            "supports_memory_efficient_fp16": built.supports_memory_efficient_fp16})
        return built.optimizer

    def begin(self, given: Sequence[Given], updates: int) -> None:
        """Set the batches of the next step, and the number of completed updates."""
        self._given, self._numbers, self.trainer.steps = given, iter(()), updates

    def train_step(self, sample: Any, *_: Any, **__: Any) -> Numbers:
        """Return the criterion's values for the next batch. The first call in each step computes
        all batches of the step.
        """
        numbers = next(self._numbers, None)
        if numbers is None:
            self._numbers = iter(self._passes())
            numbers = next(self._numbers)
        return numbers

    def _passes(self) -> list[Numbers]:
        self.model.train()
        self.model.set_num_updates(self.trainer.steps)
        norm = self.trainer.accumulate(self._micro_batches(self._given)).norm
        assert norm is not None  # the trainer clips gradients
        self.blocks.gradient_norm = norm
        return self._taken()

    def valid_step(self, sample: dict[str, Any], *_: Any, **__: Any) -> Numbers:
        """Return the criterion's values for a validation batch."""
        self.model.eval()
        self.trainer.evaluate(self._micro_batches([(sample, False)]))
        return self._taken()[0]

    def _micro_batches(self, given: Sequence[Given]) -> list[tuple[Tensor, _Call]]:
        self._calls = [_Call(sample, ignored, sample["net_input"]["src_tokens"])
                       for sample, ignored in given]
        return [(call.tokens, call) for call in self._calls]

    def _taken(self) -> list[Numbers]:
        numbers: list[Any] = [call.numbers for call in self._calls]
        self._calls = []
        return numbers

    def _loss(self, output: Tensor, call: _Call) -> Tensor:
        """Call fairseq's criterion with the model's output and the gate losses and statistics."""
        for layer, gate in call.gates.items():
            layer.gate_loss = call.slopes[layer] = gate.clone().requires_grad_()
            layer.moe_layer.stats = call.stats[layer]
        with replaced(self.model, forward=lambda **_: (output, {"attn": [None]})):
            loss, size, logged = self.criterion(self.model, call.sample)
        call.numbers = loss.detach(), size, logged
        loss = loss if self._scaler is None else self._scaler.scale(loss)
        return loss * 0 if call.ignored else loss

    def _size(self) -> float:
        """Return the sample size of the step, summed over batches as in fairseq."""
        numbers: list[Any] = [call.numbers for call in self._calls]
        sizes = [size for _, size, _ in numbers]
        return 1.0 if self._calls[-1].ignored else float(sum(sizes)) or 1.0

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the state of the model with its current weights, in host memory."""
        self.trainer.settle()
        in_files = isinstance(self.trainer.tier, DiskTier)
        held = {id(p): x for block in self.trainer.blocks for p, x in zip(
            block.params, block.read() if in_files and block.streams else block.stepped,
            strict=True)}
        state = self.model.state_dict(*args, **kwargs)
        for name, p in self.model.named_parameters(remove_duplicate=False):
            state[name] = held[id(p)].detach().to(p.dtype)  # fairseq does not save main weights
        return state

    def load_state_dict(self, state: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load the state of a run that was trained with or without streamed weights.

        Raises:
            RuntimeError: If the state belongs to a different model.
        """
        self.model.upgrade_state_dict(state)
        self.trainer.settle()
        self.trainer.forget_places()
        params = dict(self.model.named_parameters())
        before = {name: p.data for name, p in params.items()}
        streams = {id(p) for b in self.trainer.blocks if b.streams for p in b.params}
        try:
            for name, p in params.items():
                saved = state.get(name)
                if saved is not None and saved.shape == p.shape and id(p) in streams:
                    p.data = saved.to(p.dtype)
            loaded = self.model.load_state_dict(state, *args, **kwargs)
            for block in self.trainer.blocks:
                block.write([p.data for p in block.params])
        finally:
            for name, p in params.items():
                p.data = before[name]
        return loaded


def streamed_model(cfg: Any, task: Any, model: Any, criterion: Any
                   ) -> StreamedLanguageModel | None:
    """Build the model for `--weights-on host`. Return None for weights on the device."""
    if run_settings(model).offload.weights == "device":
        return None
    return StreamedLanguageModel(cfg, task, model, criterion)


def check(cfg: Any, task: Any, model: Any, criterion: Any) -> None:
    """Raise a `ValueError` if a setting cannot be used together with streamed weights."""
    config = moe_layers(model)[0].moe_layer.moe.config

    def name(value: Any, refused: bool) -> str | None:
        return type(value).__name__ if refused else None

    STREAMED.refuse(values_of(
        cfg, config, run_settings(model),
        other_model=name(model, type(model) is not MoETransformerLanguageModel),
        own_step=name(task, type(task).train_step is not FairseqTask.train_step),
        trained_criterion=name(criterion, utils.has_parameters(criterion))))
