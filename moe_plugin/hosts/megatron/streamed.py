"""Support for `--weights-on host`, which trains a Megatron model on one device while its weights
are stored in host memory.

This module can be used in any training loop that is structured like Megatron's loop. The model is
built in parts, in the same way as Megatron builds pipeline stages. The parts are the embedding,
each transformer layer, and the output layer. Each part is a block of a `StreamedTrainer`. In each
step, the parts run one after another, and each part computes all micro-batches of the step. The
training loop sees a single model, a single optimizer, and a single function that runs the forward
and backward passes. For each micro-batch, the arguments with which the forward step calls the model
are recorded. Every part is then called with these arguments.

A checkpoint folder, such as `ROOT/iter_0000100`, contains one safetensors file per part of the
model, and the progress of the run.
"""

from __future__ import annotations

import argparse
import copy
import functools
import inspect
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor, nn

from moe_plugin.comm.host_collectives import refused_together
from moe_plugin.config import OffloadConfig, run_config
from moe_plugin.hosts.megatron import checkpoint_files as files
from moe_plugin.hosts.megatron.compat import aux_losses, core
from moe_plugin.hosts.megatron.compat.optimizer import scaler_of
from moe_plugin.hosts.megatron.layer import PluginMoELayer, plugin_layers
from moe_plugin.hosts.megatron.model_settings import differs, read_progress
from moe_plugin.hosts.megatron.refusals import STREAMED, values_of
from moe_plugin.hosts.megatron.run import tracker_states
from moe_plugin.hosts.megatron.streamed_optimizer import (
    RankGradients,
    StreamedNorm,
    StreamedOptimizer,
    device_of_parts,
    torch_optimizer,
)
from moe_plugin.memory.tiers import tier_of
from moe_plugin.memory.weights.files import load_weights, save_weights
from moe_plugin.memory.weights.refusal import weights_may_stream
from moe_plugin.memory.weights.streamed import StreamedTrainer
from moe_plugin.planner.units import parse_size
from moe_plugin.training.resilience.averaging_peers import PeerSteps
from moe_plugin.utils import checksums
from moe_plugin.utils.regular_files import write_whole

META, _SCALER = "streamed.json", "loss_scaler"
_RANKS = "ranks (all, tensor-, expert-, expert-tensor-parallel)"
MakePart = Callable[..., nn.Module]  # accepts pre_process and post_process, as a pipeline stage


@dataclass
class _Calls:
    """Recorded calls of the model.

    Attributes:
        given: list with the recorded arguments of each micro-batch.
        now: index of the current micro-batch.
    """

    given: list[dict[str, Any]] = field(default_factory=list)
    now: int = 0


class ModelPart(nn.Module):
    """A part of Megatron's GPT model.

    The output of a part has shape [T, B, D]. The last part returns the losses [B, T] instead.
    """

    def __init__(self, part: Any, calls: _Calls) -> None:
        super().__init__()
        self.part: Any = part
        self.calls = calls

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of this part for `x` [T, B, D]. The first part ignores `x`."""
        given = self.calls.given[self.calls.now]
        if self.part.pre_process:
            return self.part(**given)
        self.part.set_input_tensor(x)
        try:
            y = self.part(**given)
            return y.float() if self.part.post_process else y  # as Megatron's Float16Module
        finally:
            self.part.set_input_tensor(None)  # otherwise the part would keep the input alive


class MegatronTrainer(StreamedTrainer):
    """A `StreamedTrainer` that also sets the random states of Megatron's tracker."""

    def __init__(self, calls: _Calls, *args: Any, **kwargs: Any) -> None:
        self.calls = calls
        super().__init__(*args, **kwargs)

    @contextmanager
    def randomness(self, micro_batch: int, block: int) -> Iterator[None]:
        """Set the random states for one micro-batch and one block. See `StreamedTrainer`."""
        self.calls.now = micro_batch
        with super().randomness(micro_batch, block), own_randomness():
            yield


@contextmanager
def own_randomness() -> Iterator[None]:
    """Inside the block, Megatron's tracker uses separate random states.

    The separate states are seeded with random numbers from torch's generator.
    """
    before, cuda_states = get_cuda_rng_tracker().get_states(), {}
    first, *seeds = torch.randint(2**62, (1 + len(before),), device="cpu").tolist()
    for name, seed in zip(before, seeds, strict=True):
        # tensor-parallel ranks need different states for regions in which they have different
        # tokens or channels
        torch.manual_seed(seed + ps.get_tensor_model_parallel_rank() * ("model" in name))
        cuda_states[name] = torch.cuda.get_rng_state()
    torch.manual_seed(first)
    with tracker_states(cuda_states):
        yield


class StreamedModel(nn.Module):
    """All parts of a model, with the interface of a single Megatron model chunk.

    Attributes:
        module: the parts.
        trainer: the `StreamedTrainer` that runs the parts.
        config: Megatron's `TransformerConfig`.
        norm: gradient norm of the most recent step.
        scaler: loss scaler, or None if losses are not scaled.
        peers: peers whose weights are averaged with the weights of this process, or None.
        loaded: folder of the checkpoint that was loaded, or None.
    """

    vp_stage, pre_process, post_process = None, True, True
    peers: PeerSteps | None = None
    loaded: Path | None = None

    model_type: Any  # read by Megatron

    def __init__(self, make: MakePart, args: argparse.Namespace, offload: OffloadConfig) -> None:
        super().__init__()
        self._calls, self._logged, self._count = _Calls(), list[dict[str, Tensor]](), 1
        self._args, self._embedding = args, list[nn.Parameter]()
        self.scaler = scaler_of(args)
        self._at_once = micro_batches(args)
        ranks = RankGradients() if dist.get_world_size() > 1 else None
        device = device_of_parts()
        limit = None if offload.weights_memory is None else parse_size(offload.weights_memory)
        self.trainer = MegatronTrainer(
            self._calls, [functools.partial(self._part, make, number)
                          for number in range(args.num_layers + 2)],
            self._loss, functools.partial(torch_optimizer, args), tier_of(device, offload.path),
            device=device, limit=limit, seed=args.seed + ps.get_data_parallel_rank(),
            gradients=lambda block: None,  # `StreamedNorm` reduces the summed gradients over ranks
            clip=StreamedNorm(args.clip_grad, self.scaler, ranks),
            resident=[] if args.untie_embeddings_and_output_weights else [0],
            main_weights=args.fp16 or args.bf16,
            float32_sums=args.accumulate_allreduce_grads_in_fp32)
        self.module = nn.ModuleList(block.module for block in self.trainer.blocks)
        first: Any = self.module[0].part
        self.config, self.pg_collection = first.config, getattr(first, "pg_collection", None)
        self._signature, self.norm = inspect.signature(first.forward), 0.0

    def _part(self, make: MakePart, number: int) -> nn.Module:
        """Build part `number`. Part 0 is the embedding. The following parts are the transformer
        layers, and the last part is the output layer.
        """
        args = self._args
        first, last = number == 0, number == args.num_layers + 1

        def chosen(specs: list[Any]) -> list[Any]:
            return [] if first or last else [numbered(specs[number - 1], number)]

        with core.chosen_layers(chosen):
            part: Any = make(pre_process=first, post_process=last)
        if args.fp16 or args.bf16:
            part = part.half() if args.fp16 else part.bfloat16()
        RankGradients.mark(part)
        if not args.untie_embeddings_and_output_weights:
            if first:  # the embedding stays on the device, where the output layer reads it
                self._embedding = [part.embedding.word_embeddings.weight]
            elif last:
                part.output_layer.weight = None
                part.shared_embedding_or_output_weight = lambda: self._embedding[0]
        return ModelPart(part, self._calls)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Record the arguments with which the forward step calls the model. Return an empty tensor.

        The actual computation happens later, in `passes`.
        """
        self._calls.given.append(self._signature.bind(*args, **kwargs).arguments)
        return torch.zeros(0)

    def passes(self, *, forward_step_func: Callable[..., Any], data_iterator: Any,
               num_microbatches: int, forward_only: bool = False, **_: Any
               ) -> list[dict[str, Tensor]]:
        """Run the forward and backward passes of a step. This method has the same arguments as the
        function that it replaces, which Megatron's `get_forward_backward_func` returns.
        """
        iterator = data_iterator[0] if isinstance(data_iterator, list) else data_iterator
        self._logged, self._count, left = [], num_microbatches, num_microbatches
        while left > 0:
            count = min(left, self._at_once) if forward_only else left
            left -= count
            self._calls.given.clear()
            losses = [self._loss_of(forward_step_func, iterator) for _ in range(count)]
            given = [(call["input_ids"], loss)
                     for call, loss in zip(self._calls.given, losses, strict=True)]
            if forward_only:
                self.trainer.evaluate(given)
                continue
            with aux_losses.auxiliary_scale(self._scale * (1 / num_microbatches)):
                norm = self.trainer.accumulate(given).norm
                assert norm is not None  # the trainer clips gradients
                self.norm = float(norm)
        self._calls.given.clear()
        return self._logged

    def _loss_of(self, forward_step_func: Callable[..., Any], iterator: Iterator[Any]
                 ) -> Callable[[Tensor], Any]:
        before = len(self._calls.given)
        _, loss = forward_step_func(iterator, self)
        called = len(self._calls.given) - before
        if called != 1:
            raise ValueError(
                "offload.weights=host cannot be used with this script, because its forward step "
                f"calls the model {called} times. The forward step must call the model once and "
                "return its output. Change the script, or use --weights-on device.")
        return loss

    def _loss(self, output: Tensor, loss: Callable[[Tensor], Any]) -> Tensor:
        """Return this micro-batch's share of the step's loss, as in Megatron's schedules."""
        total, *tokens, logged = loss(output)
        self._logged.append(logged)
        return (total / tokens[0].clamp(min=1) if tokens else total) / self._count * self._scale[0]

    @property
    def _scale(self) -> Tensor:
        return torch.ones(1) if self.scaler is None else self.scaler.scale

    def zero_grad_buffer(self) -> None:
        """Discard the gradients."""
        self.trainer.forget()


def build(make: MakePart, args: argparse.Namespace, settings: Mapping[str, Any]
          ) -> tuple[StreamedModel, StreamedOptimizer]:
    """Build all model parts and their optimizer. Megatron's process groups must be initialised.

    Args:
        make: function that builds a pipeline stage of the model. `make` is called once for each
            part, and returns a stage that contains only the layer of this part.
        args: parsed arguments of the training script.
        settings: settings of this package by dotted path.
    Raises:
        ValueError: If a setting cannot be used together with streamed weights.
        TierError: If the storage tier is too small for the weights of the model.
    """
    offload = run_config(settings).offload
    STREAMED.refuse(values_of(args, settings))
    with weights_may_stream():
        model = StreamedModel(make, args, offload)
    layers = plugin_layers(model)
    if args.num_experts and not layers:
        raise ValueError("offload.weights=host cannot be used with Megatron's own MoE layers, "
                         "because their routing cannot be repeated. Use --spec "
                         "moe_plugin.hosts.megatron.spec moe_layer, or --weights-on device.")
    refuse_token_ids(layers, "offload.weights=host", ", or --weights-on device")
    return model, StreamedOptimizer(model, micro_batches(args))


def refuse_token_ids(layers: Iterable[PluginMoELayer], request: str, remedy: str = "") -> None:
    """Raise a `ValueError` if a router needs token ids, which layers do not receive here."""
    for layer in layers:
        if "token_ids" in layer.needs:
            raise ValueError(
                f"router {layer.plan.config.router.name} cannot be used with {request}, because "
                f"layers do not receive token ids. Use another router{remedy}.")


def micro_batches(args: argparse.Namespace) -> int:
    """Return the number of micro-batches that each rank computes per step."""
    return args.global_batch_size // (args.micro_batch_size * ps.get_data_parallel_world_size())


def numbered(spec: Any, number: int) -> Any:
    """Return a layer spec that contains the layer's number in the whole model. Without this spec,
    Megatron would assign number 1 to the layer, because it is the only layer of its part.
    """

    class Layer(spec.module):  # type: ignore[misc,name-defined]

        def __init__(self, *args: Any, layer_number: int = 1, **kwargs: Any) -> None:
            super().__init__(*args, layer_number=number, **kwargs)

    Layer.__name__ = spec.module.__name__  # for messages
    changed = copy.copy(spec)
    changed.module = Layer
    return changed


def save_streamed(root: str, model: StreamedModel, optimizer: StreamedOptimizer,
                  settings: Mapping[str, Any], progress: Mapping[str, Any]) -> str:
    """Write a checkpoint and return the path of its folder.

    Args:
        root: path of the folder that contains the checkpoints.
        settings: settings of the model, as returned by `model_settings`.
        progress: progress of the run, as a dict of JSON values by name. The dict must contain
            "iteration" and "consumed_samples".
    Raises:
        ValueError: If the checkpoint cannot be written. Earlier checkpoints are not changed.
        FloatingPointError: On all ranks, if a weight or an optimizer state is not finite on any
            rank. The incomplete checkpoint does not become the newest checkpoint.
    """
    folder = files.folder(root, progress["iteration"])
    if (scaler := model.scaler) is not None:
        progress = {**progress, _SCALER: {name: float(x) for name, x in
                                          scaler.state_dict().items()}}
    outer = None if model.peers is None else model.peers.outer_state
    several = dist.get_world_size() > 1
    try:
        with refused_together("a checkpoint") if several else nullcontext():
            save_weights(model.trainer, _own(folder), outer, finite=True)
    except (ValueError, FloatingPointError):
        if several:  # the parts of the other ranks are useless without the part that is missing
            shutil.rmtree(folder, ignore_errors=True)
        raise
    if dist.get_rank() > 0:
        return folder
    write_whole(Path(folder, META), checksums.seal_json(
        {**progress, "settings": dict(settings), "optimizer": optimizer.kind,
         "ranks": _ranks()}))
    write_whole(Path(root, files.LATEST), str(progress["iteration"]))
    return folder


def load_streamed(root: str, model: StreamedModel, optimizer: StreamedOptimizer | None,
                  settings: Mapping[str, Any], iteration: int | None = None) -> dict[str, Any]:
    """Load a checkpoint that `save_streamed` has written, and return the progress of the run.

    If `root` contains no checkpoint, a training run logs a warning and this function returns {}.

    Args:
        optimizer: optimizer into which the state is loaded, or None if the run only evaluates.
        iteration: iteration of the checkpoint to load. By default, the newest checkpoint is loaded.
    Raises:
        ValueError: If the checkpoint belongs to a different model, is damaged, or does not contain
            streamed weights. A missing checkpoint is also an error if the run only evaluates.
    """
    found = read_progress(
        root, iteration, META, settings, "the checkpoint was not written with --weights-on host. "
        "Pass another folder to --load, or use --weights-on device.", optimizer is None)
    if found is None:
        return {}
    progress, folder = found[0], str(found[1])
    if optimizer is not None and progress.get("optimizer", optimizer.kind) != optimizer.kind:
        raise ValueError(differs(folder, "optimizer", progress["optimizer"], optimizer.kind))
    if (ranks := progress.get("ranks", [1])) != _ranks():
        raise ValueError(differs(folder, _RANKS, ranks, _ranks()))
    load_weights(model.trainer, _own(folder))
    if model.scaler is not None and (scaler := progress.pop(_SCALER, {})):
        model.scaler.load_state_dict({name: torch.tensor([x]) if name == "scale" else int(x)
                                      for name, x in scaler.items()})
    model.loaded = Path(_own(folder))
    return progress


def _own(folder: str) -> str:
    return folder if dist.get_world_size() == 1 else os.path.join(
        folder, f"rank_{dist.get_rank():05d}")


def _ranks() -> list[int]:
    """Return a list that starts with the number of ranks. If there is more than one rank, the list
    continues with the sizes of the parallel groups.
    """
    if dist.get_world_size() == 1:
        return [1]
    return [dist.get_world_size(), ps.get_tensor_model_parallel_world_size(),
            ps.get_expert_model_parallel_world_size(),
            ps.get_expert_tensor_parallel_world_size()]
