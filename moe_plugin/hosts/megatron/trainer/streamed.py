"""`--weights-on host` in our training script: Megatron's model streams through one device.

The model is built in parts, as Megatron builds pipeline stages: the embedding, each transformer
layer, the output layer. A part is a block of a `StreamedTrainer`, which lets one part after another
compute all micro-batches of a step.
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor, nn

from moe_plugin.config import OffloadConfig, run_config
from moe_plugin.hosts.megatron.compat import core
from moe_plugin.hosts.megatron.trainer import model
from moe_plugin.hosts.megatron.trainer.data import Batch
from moe_plugin.memory.tiers import tier_of
from moe_plugin.memory.weights.streamed import StreamedTrainer
from moe_plugin.observe import StatsRecorder
from moe_plugin.planner.units import parse_size

logger = logging.getLogger("moe_plugin.megatron")


class ModelPart(nn.Module):
    """A part of Megatron's GPT model: [2, B, T] of tokens and positions, or [T, B, D], to [T, B, D]
    or logits [B, T, V].
    """

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        if self.part.pre_process:
            return self.part(*x, None)
        self.part.set_input_tensor(x)
        try:
            return self.part(None, None, model.causal_mask(x.shape[0], x.device))
        finally:
            self.part.set_input_tensor(None)  # it would keep the input


class MegatronTrainer(StreamedTrainer):
    """A `StreamedTrainer` whose blocks also draw from Megatron's tracker of random states."""

    @contextmanager
    def randomness(self, micro_batch: int, block: int) -> Iterator[None]:
        """See `StreamedTrainer`."""
        tracker = get_cuda_rng_tracker()
        before, own = tracker.get_states(), {}
        with super().randomness(micro_batch, block):
            first, *seeds = torch.randint(2**62, (1 + len(before),), device="cpu").tolist()
            for name, seed in zip(before, seeds, strict=True):
                torch.manual_seed(seed)
                own[name] = torch.cuda.get_rng_state()
            torch.manual_seed(first)
            tracker.set_states(own)
            try:
                yield
            finally:
                tracker.set_states(before)


@dataclass
class StreamedTraining(model.Training):
    """What a training step needs where weights stream.

    Attributes:
        trainer: of the parts.
        losses: of the micro-batches since `take_losses`, float [2] each: sum and number of
            tokens.
        evaluates: it does not train.
    """

    trainer: Any = None
    losses: Any = None
    evaluates: bool = False

    def bare(self) -> list[nn.Module]:
        """The parts."""
        return list(self.chunks)

    def gather_parameters(self) -> None:
        """Nothing is in shards."""

    def watch(self, recorder: StatsRecorder) -> None:
        """Let a recorder watch the weights."""
        recorder.watch("weights", self.trainer.copier, self.trainer.on_device)

    def take_losses(self) -> Tensor:
        """Sums of losses and tokens since the last call, float64 [2]."""
        sums = torch.stack(self.losses).sum(0) if self.losses else torch.zeros(2)
        self.losses.clear()
        return sums.double().cpu()


class StreamedOptimizer:
    """The trainer's optimizers as the training loop and `FiniteSteps` see Megatron's one."""

    optimizer = None  # gradients are in no memory together

    def __init__(self, trainer: StreamedTrainer) -> None:
        self.trainer, self.not_finite = trainer, False

    @property
    def kind(self) -> str:
        """Name of their class."""
        return next((type(block.optimizer).__name__ for block in self.trainer.blocks
                     if block.optimizer is not None), "none")

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Of all parts."""
        return self.trainer.param_groups

    def get_loss_scale(self) -> float:
        """Of float32: 1."""
        return 1.0

    def prepare_grads(self) -> bool:
        """Whether the last step was skipped."""
        return self.not_finite


class StreamedNorm:
    """The bits of Megatron's own clipping, without Apex and Transformer Engine, for one process: a
    `memory.weights.streamed.Clip`.

    Megatron takes the norm of the tensors' norms, of dense parameters and of experts apart, in the
    order of the optimizer: matrices of the whole model, then vectors.

    Args:
        max_norm: of all gradients; 0: they are not clipped.
    """

    def __init__(self, max_norm: float) -> None:
        self.max_norm, self._factor = max_norm, 1.0
        self._norms: dict[tuple[bool, bool, int], list[Tensor]] = {}

    @torch.no_grad()
    def add(self, place: int, parameters: Sequence[nn.Parameter]) -> None:
        """Take the gradients of a part; place: its number."""
        for parameter in parameters:
            if parameter.grad is not None:
                expert = not getattr(parameter, "allreduce", True)  # Megatron's mark
                key = (expert, parameter.dim() == 1, place)
                self._norms.setdefault(key, []).append(torch.norm(parameter.grad))

    def norm(self) -> Tensor:
        """The norm of all that was taken since the last call, 0-dim float64."""
        kinds = [self._norm_of(expert) for expert in (False, True)]
        kinds = [norm for norm in kinds if norm is not None]
        total = kinds[0] if len(kinds) == 1 else math.sqrt(sum(norm**2 for norm in kinds))
        self._factor = self.max_norm / (total + 1e-6) if self.max_norm > 0 else 1.0
        self.forget()
        return torch.tensor(total, dtype=torch.float64)

    def _norm_of(self, expert: bool) -> float | None:
        keys = sorted(key for key in self._norms if key[0] == expert)
        norms = [float(norm) for key in keys for norm in self._norms[key]]
        if not norms:
            return None
        return float(torch.norm(torch.tensor(norms, dtype=torch.float32))**2.0)**0.5

    def scale(self, gradients: Sequence[Tensor]) -> None:
        """Make them smaller where the norm is above its bound."""
        if self._factor < 1:
            for gradient in gradients:
                gradient.mul_(self._factor)

    def forget(self) -> None:
        """Drop what was taken."""
        self._norms = {}


def build(args: argparse.Namespace, config: Any, settings: Mapping[str, Any],
          vocab_size: int) -> StreamedTraining:
    """The model in parts and its trainer; Megatron's groups must be initialised.

    Raises:
        ValueError: a setting does not fit weights that stream, with the remedy.
        TierError: the tier has no room for the weights.
    """
    offload = run_config(settings).offload
    _check(args, settings, offload)
    ours = {path: value for path, value in settings.items() if not path.startswith("offload.")}
    losses: list[Tensor] = []
    micro_batches = args.global_batch_size // args.micro_batch_size
    device = torch.device("cpu")
    if torch.cuda.is_available() and not args.cpu:
        device = torch.device("cuda", torch.cuda.current_device())
    limit = None if offload.weights_memory is None else parse_size(offload.weights_memory)
    trainer = MegatronTrainer(
        [functools.partial(_part, args, config, ours, vocab_size, number)
         for number in range(args.num_layers + 2)],
        functools.partial(_loss, losses, micro_batches), functools.partial(_optimizer, args),
        tier_of(device, offload.path), device=device, limit=limit, seed=args.seed,
        clip=StreamedNorm(args.clip_grad), skip_not_finite=True)
    training = StreamedTraining([block.module for block in trainer.blocks],
                                StreamedOptimizer(trainer), config,
                                model.model_settings(args, config), trainer=trainer, losses=losses,
                                evaluates=args.skip_train)
    for layer in training.moe_layers():
        if "token_ids" in layer.needs:
            raise ValueError(
                f"router {layer.plan.config.router.name} does not fit offload.weights=host, where "
                "layers do not see token ids: use another one, or --weights-on device")
    held = sum(block.layout.nbytes for block in trainer.blocks)
    logger.info("weights: %.1f MiB in %s, stream in %d parts through %.1f MiB", held / 2**20,
                "files" if device.type == "cpu" else "host memory", len(trainer.blocks),
                trainer.device_bytes / 2**20)
    return training


def _check(args: argparse.Namespace, settings: Mapping[str, Any], offload: OffloadConfig) -> None:
    plain = "leave it out"
    unfit = [(f"{dist.get_world_size()} processes", dist.get_world_size() > 1,
              "start one, or train with moe_plugin.hosts.plain.streamed.streamed_trainer"),
             ("tied embeddings, a parameter of two parts",
              not args.untie_embeddings_and_output_weights,
              "give --untie-embeddings-and-output-weights"),
             ("--bf16 or --fp16", args.bf16 or args.fp16, "train in float32"),
             ("--native-moe", args.native_moe, plain),
             ("--calculate-per-token-loss", args.calculate_per_token_loss, plain),
             ("--moe-router-enable-expert-bias", args.moe_router_enable_expert_bias,
              "use --moe-router sigmoid_bias"),
             ("--use-distributed-optimizer", args.use_distributed_optimizer, plain),
             ("--recompute-granularity", args.recompute_granularity is not None,
              "leave it out: every part is computed again"),
             ("--ensemble-heads", args.ensemble_heads > 1, plain),
             ("--moe-lighthouse", args.moe_lighthouse is not None,
              "use moe_plugin.resilience.averaging_peers.StreamedPeer"),
             (f"offload.activations={offload.activations}", offload.activations != "keep",
              "leave it out: every part is computed again"),
             ("router.pre_gate", bool(settings.get("router.pre_gate")),
              "use 0: parts run one after another"),
             ("dispatch.name=bounded", settings.get("dispatch.name") == "bounded",
              "use another dispatcher: a step cannot be repeated"),
             ("guard.votes", bool(settings.get("guard.votes")), plain),
             ("guard.twins", bool(settings.get("guard.twins")), plain)]
    for what, is_so, remedy in unfit:
        if is_so:
            raise ValueError(f"offload.weights=host does not fit {what} in Megatron: {remedy}")


def _part(args: argparse.Namespace, config: Any, settings: Mapping[str, Any], vocab_size: int,
          number: int) -> nn.Module:
    """Part `number`: 0 the embedding, then the layers, last the output."""
    whole = model.layer_spec(args, config, settings, None)
    spec = copy.copy(whole)
    last = number == args.num_layers + 1
    spec.layer_specs = ([] if number == 0 or last else
                        [_numbered(whole.layer_specs[number - 1], number)])
    return ModelPart(model.gpt(args, config, spec, vocab_size, pre_process=number == 0,
                               post_process=last))


def _numbered(spec: Any, number: int) -> Any:
    """The spec of a layer which is the only one of its part, but has its number in the model."""

    class Layer(spec.module):  # type: ignore[misc,name-defined]

        def __init__(self, *args: Any, layer_number: int = 1, **kwargs: Any) -> None:
            super().__init__(*args, layer_number=number, **kwargs)

    Layer.__name__ = spec.module.__name__  # for messages
    changed = copy.copy(spec)
    changed.module = Layer
    return changed


def _loss(logged: list[Tensor], micro_batches: int, logits_BTV: Tensor,
          given: tuple[nn.Module, Batch]) -> Tensor:
    """Of one of so many micro-batches; the numbers of `model.forward_step` and Megatron's schedule.
    """
    part, batch = given
    logits_TBV = logits_BTV.transpose(0, 1).contiguous()
    loss_BT = part.compute_language_model_loss(batch.labels, logits_TBV)
    tokens = batch.loss_mask.sum()
    total = (loss_BT.float() * batch.loss_mask).sum()
    logged.append(torch.stack([total.detach(), tokens.detach()]))
    return total / tokens.clamp(min=1) / micro_batches


def _optimizer(args: argparse.Namespace, params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Torch's, as Megatron uses it; vectors have no weight decay."""
    kinds = [(args.weight_decay, [p for p in params if p.dim() != 1]),
             (0.0, [p for p in params if p.dim() == 1])]
    groups = [{"params": chosen, "weight_decay": decay} for decay, chosen in kinds if chosen]
    make: Callable[..., torch.optim.Optimizer] = functools.partial(
        torch.optim.SGD, momentum=args.sgd_momentum)
    if args.optimizer == "adam":
        make = functools.partial(torch.optim.AdamW, betas=(args.adam_beta1, args.adam_beta2),
                                 eps=1e-8, fused=args.moe_fused_adam or None)
    return make(groups, lr=args.lr)


def step(training: StreamedTraining, batches: Iterator[Batch], micro_batches: int) -> float:
    """Train on so many micro-batches; the norm of the gradients."""
    training.losses.clear()
    with core.auxiliary_scale(1 / micro_batches):
        result = training.trainer.step(_given(training, batches, micro_batches))
    training.optimizer.not_finite = not bool(result.norm.isfinite())
    return float(result.norm)


def evaluate(training: StreamedTraining, batches: Iterator[Batch], count: int,
             at_once: int) -> Tensor:
    """Sums of losses and tokens of so many micro-batches, float64 [2]; so many at once."""
    training.losses.clear()
    while count > 0:
        training.trainer.evaluate(_given(training, batches, min(count, at_once)))
        count -= at_once
    return training.take_losses()


def _given(training: StreamedTraining, batches: Iterator[Batch], count: int
           ) -> list[tuple[Tensor, Any]]:
    last = training.chunks[-1].part
    return [(torch.stack([batch.tokens, batch.positions]), (last, batch))
            for batch in itertools.islice(batches, count)]
