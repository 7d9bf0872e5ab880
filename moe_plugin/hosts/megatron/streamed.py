"""`--weights-on host`: Megatron's model streams through one device, in any loop of Megatron's form.

The model is built in parts, as Megatron builds pipeline stages: the embedding, each transformer
layer, the output layer. A part is a block of a `StreamedTrainer`, which lets one part after another
compute all micro-batches of a step. The loop has one model, optimizer and function of the passes:
what its forward step gives the model is kept for each micro-batch, and every part is called with
it.
"""

from __future__ import annotations

import argparse
import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor, nn

from moe_plugin.config import OffloadConfig, run_config
from moe_plugin.hosts.megatron.compat import core
from moe_plugin.hosts.megatron.compat.optimizer import scaler_of
from moe_plugin.hosts.megatron.layer import plugin_layers
from moe_plugin.hosts.megatron.streamed_optimizer import (
    RankGradients,
    StreamedNorm,
    StreamedOptimizer,
    device_of_parts,
    torch_optimizer,
)
from moe_plugin.memory.tiers import tier_of
from moe_plugin.memory.weights.refusal import weights_may_stream
from moe_plugin.memory.weights.streamed import StreamedTrainer
from moe_plugin.planner.units import parse_size
from moe_plugin.training.resilience.averaging_peers import PeerSteps, unfit_peer
from moe_plugin.utils.run_feature import refuse_unfit

MakePart = Callable[..., nn.Module]  # of pre_process and post_process, as of a pipeline stage


@dataclass
class _Calls:
    """Of the model, by micro-batch; now: whose turn it is."""

    given: list[dict[str, Any]] = field(default_factory=list)
    now: int = 0


class ModelPart(nn.Module):
    """A part of Megatron's GPT model: to [T, B, D], or the last one to losses [B, T]."""

    def __init__(self, part: nn.Module, calls: _Calls) -> None:
        super().__init__()
        self.part, self.calls = part, calls

    def forward(self, x: Tensor) -> Tensor:
        """x: [T, B, D]; of the first part anything."""
        given = self.calls.given[self.calls.now]
        if self.part.pre_process:
            return self.part(**given)
        self.part.set_input_tensor(x)
        try:
            y = self.part(**given)
            return y.float() if self.part.post_process else y  # as Megatron's Float16Module
        finally:
            self.part.set_input_tensor(None)  # it would keep the input


class MegatronTrainer(StreamedTrainer):
    """A `StreamedTrainer` whose blocks also draw from Megatron's tracker of random states."""

    def __init__(self, calls: _Calls, *args: Any, **kwargs: Any) -> None:
        self.calls = calls
        super().__init__(*args, **kwargs)

    @contextmanager
    def randomness(self, micro_batch: int, block: int) -> Iterator[None]:
        """See `StreamedTrainer`."""
        self.calls.now = micro_batch
        with super().randomness(micro_batch, block), own_randomness():
            yield


@contextmanager
def own_randomness() -> Iterator[None]:
    """Inside, Megatron's tracker of random states has states of its own, drawn from torch's
    generator.
    """
    tracker = get_cuda_rng_tracker()
    before, own = tracker.get_states(), {}
    first, *seeds = torch.randint(2**62, (1 + len(before),), device="cpu").tolist()
    for name, seed in zip(before, seeds, strict=True):
        # where tensor-parallel ranks have different tokens or channels
        torch.manual_seed(seed + ps.get_tensor_model_parallel_rank() * ("model" in name))
        own[name] = torch.cuda.get_rng_state()
    torch.manual_seed(first)
    tracker.set_states(own)
    try:
        yield
    finally:
        tracker.set_states(before)


class StreamedModel(nn.Module):
    """The parts, as the one chunk of a model of Megatron's.

    Attributes:
        module: the parts.
        trainer: of them.
        config: Megatron's.
        norm: of the gradients of the last passes.
        scaler: of the loss; None: nothing scales it.
        peers: that average their weights with this one.
        loaded: folder of the checkpoint that was.
    """

    vp_stage, pre_process, post_process = None, True, True
    peers: PeerSteps | None = None
    loaded: Path | None = None

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
            gradients=lambda block: None,  # the clipping completes them, once summed
            clip=StreamedNorm(args.clip_grad, self.scaler, ranks),
            resident=[] if args.untie_embeddings_and_output_weights else [0],
            main_weights=args.fp16 or args.bf16,
            float32_sums=args.accumulate_allreduce_grads_in_fp32)
        self.module = nn.ModuleList(block.module for block in self.trainer.blocks)
        first = self.module[0].part
        self.config, self.pg_collection = first.config, getattr(first, "pg_collection", None)
        self._signature, self.norm = inspect.signature(first.forward), 0.0

    def _part(self, make: MakePart, number: int) -> nn.Module:
        """Part `number`: 0 the embedding, then the layers, last the output."""
        args = self._args
        first, last = number == 0, number == args.num_layers + 1

        def chosen(specs: list[Any]) -> list[Any]:
            return [] if first or last else [numbered(specs[number - 1], number)]

        with core.chosen_layers(chosen):
            part = make(pre_process=first, post_process=last)
        if args.fp16 or args.bf16:
            part = part.half() if args.fp16 else part.bfloat16()
        RankGradients.mark(part)
        if not args.untie_embeddings_and_output_weights:
            if first:  # it stays on the device, where the output reads it
                self._embedding = [part.embedding.word_embeddings.weight]
            elif last:
                part.output_layer.weight = None
                part.shared_embedding_or_output_weight = lambda: self._embedding[0]
        return ModelPart(part, self._calls)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Keeps what the forward step gives the model. Nothing is computed yet: what comes back
        takes the place of an output.
        """
        self._calls.given.append(self._signature.bind(*args, **kwargs).arguments)
        return torch.zeros(0)

    def passes(self, *, forward_step_func: Callable[..., Any], data_iterator: Any,
               num_microbatches: int, forward_only: bool = False, **_: Any
               ) -> list[dict[str, Tensor]]:
        """In the place of what Megatron's `get_forward_backward_func` returns, with its arguments.
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
            with core.auxiliary_scale(self._scale * (1 / num_microbatches)):
                self.norm = float(self.trainer.accumulate(given).norm)
        self._calls.given.clear()
        return self._logged

    def _loss_of(self, forward_step_func: Callable[..., Any], iterator: Iterator[Any]
                 ) -> Callable[[Tensor], Any]:
        before = len(self._calls.given)
        _, loss = forward_step_func(iterator, self)
        called = len(self._calls.given) - before
        if called != 1:
            raise ValueError(
                f"offload.weights=host does not fit this script, whose forward step calls the model"
                f" {called} times: it must call it once and return its output; use "
                "--weights-on device")
        return loss

    def _loss(self, output: Tensor, loss: Callable[[Tensor], Any]) -> Tensor:
        """Of one micro-batch: its part of the step's, as in Megatron's schedules."""
        total, *tokens, logged = loss(output)
        self._logged.append(logged)
        return (total / tokens[0].clamp(min=1) if tokens else total) / self._count * self._scale[0]

    @property
    def _scale(self) -> Tensor:
        return torch.ones(1) if self.scaler is None else self.scaler.scale

    def zero_grad_buffer(self) -> None:
        """Drop the gradients."""
        self.trainer.forget()


def build(make: MakePart, args: argparse.Namespace, settings: Mapping[str, Any]
          ) -> tuple[StreamedModel, StreamedOptimizer]:
    """The model in parts, and its optimizer; Megatron's groups must be initialised.

    Args:
        make: a pipeline stage of the model, of which it may build a part of the layers alone.
        args: of a training script.
        settings: ours, by dotted path.
    Raises:
        ValueError: a setting does not fit weights that stream, with the remedy.
        TierError: the tier has no room for the weights.
    """
    offload = run_config(settings).offload
    _check(args, settings, offload)
    with weights_may_stream():
        model = StreamedModel(make, args, offload)
    layers = plugin_layers(model)
    if args.num_experts and not layers:
        raise ValueError("offload.weights=host does not fit Megatron's own MoE layers, whose "
                         "routing cannot be repeated: give --spec moe_plugin.hosts.megatron.spec "
                         "moe_layer, or use --weights-on device")
    for layer in layers:
        if "token_ids" in layer.needs:
            raise ValueError(
                f"router {layer.plan.config.router.name} does not fit offload.weights=host, where "
                "layers do not see token ids: use another one, or --weights-on device")
    return model, StreamedOptimizer(model, micro_batches(args))


def micro_batches(args: argparse.Namespace) -> int:
    """Of a step, on each rank."""
    return args.global_batch_size // (args.micro_batch_size * ps.get_data_parallel_world_size())


def _check(args: argparse.Namespace, settings: Mapping[str, Any], offload: OffloadConfig) -> None:
    plain = "leave it out"
    given = functools.partial(getattr, args)  # each loop has flags that the other one lacks
    unfit = [*((f"--{name}-parallel-size {size}", size > 1, "use 1: " + remedy)
               for name, size, remedy in (
                   ("pipeline-model", args.pipeline_model_parallel_size,
                    "a rank computes all layers, one after another"),
                   ("context", args.context_parallel_size,
                    "share a sequence by --sequence-parallel"))),
             (f"--optimizer {args.optimizer}", args.optimizer not in ("adam", "sgd"),
              "use adam or sgd"),
             ("--moe-router-enable-expert-bias", args.moe_router_enable_expert_bias,
              "use --moe-router sigmoid_bias"),
             ("--recompute-granularity", args.recompute_granularity is not None,
              "leave it out: every part is computed again"),
             ("--ensemble-heads", given("ensemble_heads", 1) > 1, plain),
             *unfit_peer(offload, given("moe_lighthouse", None)),
             (f"offload.activations={offload.activations}", offload.activations != "keep",
              "leave it out: every part is computed again"),
             ("router.pre_gate", bool(settings.get("router.pre_gate")),
              "use 0: parts run one after another"),
             ("dispatch.name=bounded", settings.get("dispatch.name") == "bounded",
              "use another dispatcher: a step cannot be repeated"),
             ("gradient_accumulation_fusion", bool(given("gradient_accumulation_fusion", None)),
              "give --no-gradient-accumulation-fusion"),
             # which an evaluation implies
             ("--no-load-optim", bool(given("no_load_optim", None)) and not args.skip_train, plain),
             *((f"guard.{name}", bool(settings.get(f"guard.{name}")), plain)
               for name in ("votes", "twins")),
             *(("--" + name.replace("_", "-"), bool(given(name, None)), plain) for name in (
                 "fp8", "fp4", "native_moe", "calculate_per_token_loss",
                 "use_distributed_optimizer",
                 "hybrid_layer_pattern", "mtp_num_layers", "log_params_norm", "decoupled_lr",
                 "use_megatron_fsdp", "use_torch_fsdp2", "finetune", "pretrained_checkpoint",
                 "async_save",
                 "moe_use_upcycling", "overlap_moe_expert_parallel_comm", "freeze_all_layers",
                 "use_mup", "no_save_optim", "exit_on_missing_checkpoint", "ckpt_convert_format",
                 "no_weight_decay_cond_type", "apply_wd_to_qk_layernorm"))]
    refuse_unfit("offload.weights=host", ((f"{what} in Megatron", not is_so, remedy)
                                          for what, is_so, remedy in unfit))


def numbered(spec: Any, number: int) -> Any:
    """The spec of a layer which is the only one of its part, but has its number in the model."""

    class Layer(spec.module):  # type: ignore[misc,name-defined]

        def __init__(self, *args: Any, layer_number: int = 1, **kwargs: Any) -> None:
            super().__init__(*args, layer_number=number, **kwargs)

    Layer.__name__ = spec.module.__name__  # for messages
    changed = copy.copy(spec)
    changed.module = Layer
    return changed
