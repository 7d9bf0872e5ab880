"""Build GPT models in Megatron-core: with our layer, with Megatron's own layer, and without
experts.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.bench.peers.base import copy
from scripts.bench.peers.megatron import load
from scripts.bench.train import sides
from scripts.bench.train.sides import Settings, Side, TrainShape

DISPATCHERS = ("alltoall", "allgather")
SEED, VOCABULARY = 1234, 384  # the vocabulary is that of bytes, padded as in Megatron


def import_host() -> None:
    from moe_plugin.hosts.megatron.compat import cpu

    cpu.enable(force=True)
    from moe_plugin.hosts.megatron import spec  # noqa: F401


def build(shape: TrainShape, text: Tensor, rank: int, ranks: int,
          ours: Mapping[str, Settings], others: bool, evaluate: bool = False) -> list[Side]:
    """Build all models with the same weights in Megatron's groups. See `run.sides_of`."""
    start(ranks)
    config = config_of(shape, ranks)
    source = Batches(shape, text, rank, ranks, evaluate)
    first, built = None, []
    for name, settings in ours.items():
        made = make(shape, config, {key: value for key, value in settings.items()
                                    if key != sides.FUSED_ADAM}, sides.FUSED_ADAM in settings)
        first = first or made
        built.append(side_of(name, "ours", made, source))
        _copy_weights(first, made)
    if not others:
        return built
    for name in DISPATCHERS:
        made = make(shape, replace(config, moe_token_dispatcher_type=name))
        built.append(side_of(f"Megatron, {name}", "native", made, source))
        _copy_weights(first, made)
    dense = replace(config, num_moe_experts=None, moe_ffn_hidden_size=None,
                    expert_model_parallel_size=1, ffn_hidden_size=shape.inner * shape.top_k)
    made = make(shape, dense)
    _copy_weights(first, made)
    return [*built, side_of("dense", "dense", made, source)]


def _take_choices(router: Any, choose: sides.Chooser) -> None:
    """Make `choose` select the experts in one of Megatron's routers. See `Side.routers`."""
    module = sys.modules[type(router).__module__]
    routing, choice = router.routing, module.topk_routing_with_score_function

    def routed(logits: Tensor, *args: Any, **more: Any) -> Any:
        logits_TE = logits.detach().view(-1, logits.shape[-1])
        chosen_TK = choose(logits_TE, logits_TE.topk(router.topk, dim=1).indices)
        with patch.object(module, "topk_routing_with_score_function",
                          partial(choice, precomputed_indices=chosen_TK)):
            return routing(logits, *args, **more)

    router.routing = routed


def _copy_weights(source: Made | None, target: Made) -> None:
    """Copy all weights. Parameters are matched by name, except for experts, which have different
    names in the two layers.
    """
    if source is None or source is target:
        return
    mine, theirs = source.chunk.module, target.chunk.module
    known = dict(mine.named_parameters())
    for name, parameter in theirs.named_parameters():
        if name in known and known[name].shape == parameter.shape:
            copy(parameter, known[name])
    native = [m for m in theirs.modules() if _is_native(m)]
    for layer, other in zip(source.moe_layers(), native, strict=bool(native)):
        _copy_experts(layer, other)
    target.optimizer.reload_model_params()  # updates the optimizer's copies in float32


def _is_native(module: nn.Module) -> bool:
    from moe_plugin.hosts.megatron.compat import core
    from moe_plugin.hosts.megatron.layer import PluginMoELayer

    return isinstance(module, core.MoELayer) and not isinstance(module, PluginMoELayer)


def _copy_experts(layer: Any, native: Any) -> None:
    load(native, layer.router.weight_ED, getattr(layer.experts, "w_gate_LDF", None),
         layer.experts.w_in_LDF, layer.experts.w_out_LFD)


def start(ranks: int) -> None:
    """Prepare this process before the first model is built."""
    from megatron.core import parallel_state

    from moe_plugin.hosts.megatron.compat.settings import mend_config_warning

    import_host()
    mend_config_warning()
    if not parallel_state.model_parallel_is_initialized():  # an earlier shape may have done so
        parallel_state.initialize_model_parallel(expert_model_parallel_size=ranks)


def config_of(shape: TrainShape, ranks: int) -> Any:
    from moe_plugin.hosts.megatron.compat.names import TransformerConfig

    return TransformerConfig(
        num_layers=shape.layers, hidden_size=shape.width, num_attention_heads=4,
        num_moe_experts=shape.experts, moe_ffn_hidden_size=shape.inner,
        moe_router_topk=shape.top_k, expert_model_parallel_size=ranks, add_bias_linear=False,
        # With one expert per token, Megatron normalises its weight to 1 unless the softmax is
        # computed before the experts are selected.
        moe_router_pre_softmax=shape.top_k == 1, moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=0.01, moe_router_dtype="fp32", hidden_dropout=0.0,
        attention_dropout=0.0, use_cpu_initialization=True, gradient_accumulation_fusion=False,
        bf16=shape.bf16, params_dtype=torch.bfloat16 if shape.bf16 else torch.float32,
        gated_linear_unit=shape.gated, activation_func=F.silu if shape.gated else F.gelu)


@dataclass
class Made:
    """A Megatron model with its optimizer and its run features."""

    config: Any
    chunk: Any
    optimizer: Any
    run: Any

    def moe_layers(self) -> list[Any]:
        from moe_plugin.hosts.megatron.layer import plugin_layers

        return plugin_layers(self.chunk)


def make(shape: TrainShape, config: Any, settings: Settings | None = None,
          fused: bool = False) -> Made:
    """Build a model.

    Args:
        config: Megatron's configuration.
        settings: settings of our layer. None (default) builds the layers of Megatron's own layer
            spec.
        fused: whether to use the fused Adam optimizer.
    """
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from moe_plugin.comm.host_collectives import comm_of
    from moe_plugin.config import run_config
    from moe_plugin.hosts.megatron.compat import core, names
    from moe_plugin.hosts.megatron.compat.finite import PreparedGradients
    from moe_plugin.hosts.megatron.compat.optimizer import use_fused_adam
    from moe_plugin.hosts.megatron.run import MegatronStart
    from moe_plugin.hosts.megatron.spec import swap_moe
    from moe_plugin.training.run_features import HostSeams, make_run

    torch.manual_seed(SEED)
    model_parallel_cuda_manual_seed(SEED)
    torch.manual_seed(SEED)  # on CPU, torch and Megatron share one generator
    config = replace(config)  # a copy, because functions of this model are stored in it below
    spec = core.gpt_block_spec(config, False)
    model = names.GPTModel(
        config, spec if settings is None else swap_moe(spec, dict(settings)),
        vocab_size=VOCABULARY, max_sequence_length=shape.length, parallel_output=True,
        share_embeddings_and_output_weights=True)
    if shape.bf16:
        model = names.Float16Module(config, model)
    chunk = names.DistributedDataParallel(
        config=config, module=model,
        ddp_config=names.DistributedDataParallelConfig(grad_reduce_in_fp32=shape.bf16))
    chunk.broadcast_params()
    optimizer = names.get_megatron_optimizer(
        names.OptimizerConfig(optimizer="adam", lr=1e-3, weight_decay=0.01, clip_grad=1.0,
                              bf16=shape.bf16, params_dtype=config.params_dtype), [chunk])
    use_fused_adam(optimizer, fused)
    config.finalize_model_grads_func = names.finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    run = make_run(run_config(settings or {}), HostSeams(
        host="megatron", models=[model], world=comm_of(), start=MegatronStart))
    PreparedGradients(optimizer, lambda: run)
    made = Made(config, chunk, optimizer, run)
    for layer in made.moe_layers():
        layer.run_ends_steps = True
    return made


class Batches:
    """A sequence of training batches. Each batch consists of tokens and labels, each [B, T].

    Args:
        text: the text, uint8 [N].
        rank: this rank.
        evaluate: whether the batches are used for evaluation.
    """

    def __init__(self, shape: TrainShape, text: Tensor, rank: int, ranks: int,
                 evaluate: bool = False) -> None:
        self.text, self.rank, self.length, self.evaluate = text, rank, shape.length, evaluate
        self.sentences = shape.sentences(ranks)
        self.positions_BT = torch.arange(self.length).expand(self.sentences, -1)
        self.mask = torch.ones(1, 1, self.length, self.length, dtype=torch.bool).triu(1)

    def __call__(self, number: int) -> tuple[Tensor, Tensor]:
        bytes_BT = sides.batch(self.text, number, self.sentences, self.length, self.rank)
        return bytes_BT[:, :-1], bytes_BT[:, 1:]


def side_of(name: str, kind: str, made: Made, source: Batches) -> Side:
    from moe_plugin.hosts.megatron.compat.names import get_forward_backward_func
    from moe_plugin.hosts.megatron.compat.optimizer import parts
    from moe_plugin.utils.run_feature import StepFacts, StepInput

    passes, done = get_forward_backward_func(), [0]

    def forward_step(batches: Any, model: Any) -> Any:
        tokens_BT, labels_BT = next(batches)
        losses_BT = model(tokens_BT, source.positions_BT, source.mask, labels=labels_BT)
        return losses_BT, lambda each_BT: (each_BT.float().mean(),
                                           {"lm loss": each_BT.detach().float().mean()})

    def once(given: Any) -> Any:
        made.chunk.zero_grad_buffer()
        made.optimizer.zero_grad()
        logged = passes(forward_step_func=forward_step, data_iterator=iter([given]),
                        model=made.chunk, num_microbatches=1, seq_length=source.length,
                        micro_batch_size=source.sentences, forward_only=source.evaluate)
        made.run.after_passes()
        return logged

    def evaluation(number: int) -> float:
        made.chunk.eval()
        with torch.no_grad():
            return float(made.run.compute(lambda: once(source(number)))[0]["lm loss"])

    def step(number: int) -> float:
        given = source(number)
        done[0] += 1
        with made.run.around_step(StepInput(done[0], lambda: given, lambda _: torch.zeros(()))):
            logged = made.run.compute(lambda: once(given))
            made.optimizer.step()
        made.run.after_step(StepFacts(done[0]))
        return float(logged[0]["lm loss"])

    layers = [layer.moe for layer in made.moe_layers()]
    optimizers = [part.optimizer for part in parts(made.optimizer) if part.optimizer is not None]
    settled = (lambda: True) if source.evaluate else sides.tuners_settled(layers)
    return Side(name, kind, evaluation if source.evaluate else step, optimizers, settled,
                lambda: sides.layout_of(layers, source.sentences * source.length),
                list(made.chunk.parameters()),
                [*(partial(sides.take_choices, layer) for layer in layers),
                 *(partial(_take_choices, m.router) for m in made.chunk.modules()
                   if _is_native(m))], made.optimizer.reload_model_params)
