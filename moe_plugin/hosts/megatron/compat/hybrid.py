"""Replacement for the layer stack of hybrid models (`HybridModel` in Megatron 0.18 and 0.19).

A hybrid model has one layer for each symbol in `--hybrid-layer-pattern`. Megatron's own spec of a
hybrid model needs Transformer Engine. Without Transformer Engine, the stack is built from the
modules that Megatron uses in its local GPT layers. The parameter names are the same as with
Transformer Engine.

| symbol | layer | without Transformer Engine |
|---|---|---|
| `*`, `-`, `E` | attention, MLP, mixture of experts | yes |
| `M` | Mamba, also needs mamba_ssm and einops | refused |
| `G`, `D`, `+` | gated delta net, sparse and latent attention | refused |
"""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import replace
from typing import Any

from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer import multi_token_prediction as mtp
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.moe.moe_logging import MoEMetricsTracker
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer

from moe_plugin.hosts.megatron.compat import core
from moe_plugin.hosts.megatron.compat.settings import script_arguments, setting
from moe_plugin.utils.messages import short

_LOCAL, _SEPARATORS = "*-E", "|/"
_FOR_MAMBA = "mamba_ssm", "einops"
_NO_ATTENTION = {"input_layernorm": IdentityOp, "self_attention": IdentityOp,
                 "self_attn_bda": IdentityFuncOp}
_NO_MLP = {"pre_mlp_layernorm": IdentityOp, "mlp": IdentityOp, "mlp_bda": IdentityFuncOp}


def stack_spec(config: Any, pattern: str, transformer_engine: bool | None) -> ModuleSpec:
    """Return the spec of a hybrid model that uses Megatron's own MoE layer.

    Args:
        config: `TransformerConfig`.
        pattern: string with one symbol for each layer.
        transformer_engine: True to use Transformer Engine. By default, Transformer Engine is used
            if it is installed.
    Raises:
        ValueError: If a layer in the pattern cannot be built.
    """
    if "E" in pattern and not config.num_moe_experts:
        raise ValueError(f"hybrid_layer_pattern={pattern!r} contains layers of experts (E), but "
                         "num_moe_experts is not set. Set --num-experts.")
    engine = core.with_engine(transformer_engine)
    if not engine:
        _refuse(pattern, set(pattern) - {*_LOCAL, *_SEPARATORS},
                "need Transformer Engine. Install transformer-engine and leave out "
                "--transformer-impl local, or use only *, - and E.")
        return _local_spec(config)
    missing = [name for name in _FOR_MAMBA if importlib.util.find_spec(name) is None]
    _refuse(pattern, {"M"} & set(pattern if missing else ""),
            f"need {', '.join(missing)}. Run pip install mamba-ssm causal-conv1d einops on a "
            "machine with a GPU.")
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec

    spec: ModuleSpec = hybrid_stack_spec
    return spec


def mend_loss_log() -> None:
    """Make all pipeline stages log the same number of auxiliary losses, and make Megatron divide
    the logged sums by the number of MoE layers.

    In Megatron 0.18 and 0.19, a stage without experts logs one value per MoE layer, whereas a stage
    with experts logs one value per layer. Because these numbers differ between stages, summing the
    logs over the stages hangs or gives a wrong sum. Megatron also divides by the wrong number of
    MoE layers, because it computes this number from `moe_layer_freq`, which hybrid models do not
    use. In addition, Megatron counts multi-token predictions twice.
    """
    original: Any = MoEMetricsTracker.ensure_initialized
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def ensure(self: Any, name: str, num_layers: int, device: Any = None) -> None:
        arguments = script_arguments()
        if arguments.get("hybrid_layer_pattern"):
            num_layers = arguments["num_layers"] + (arguments.get("mtp_num_layers") or 0)
        original(self, name, num_layers, device)

    report: Any = MoEMetricsTracker.report

    @functools.wraps(report)
    def report_mean(self: Any, *args: Any, **kwargs: Any) -> Any:
        if pattern := script_arguments().get("hybrid_layer_pattern"):
            kwargs |= {"num_layers": pattern.count("E"), "moe_layer_freq": None,
                       "mtp_num_layers": None}
        return report(self, *args, **kwargs)

    MoEMetricsTracker.ensure_initialized, MoEMetricsTracker.report = ensure, report_mean


def _refuse(pattern: str, symbols: set[str], why: str) -> None:
    if symbols:
        raise ValueError(f"hybrid_layer_pattern={short(pattern)} contains the layers "
                         f"{' '.join(sorted(symbols))}, which {why}")


class LocalStack(HybridStack):
    """A hybrid layer stack whose final norm is built with `norm(config, hidden_size, eps)`.

    Megatron's own stack always uses the norm of Transformer Engine, even if the spec contains a
    different norm.
    """

    def __init__(self, *args: Any, norm: Any, post_layer_norm: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, post_layer_norm=False, **kwargs)
        self.post_layer_norm = post_layer_norm
        if self.post_process and post_layer_norm:
            self.final_norm = norm(config=self.config, hidden_size=self.config.hidden_size,
                                   eps=self.config.layernorm_epsilon)


def _local_spec(config: Any) -> ModuleSpec:

    def layer(experts: int | None) -> Any:
        spec = core.call_supported(
            gpt_layer_specs.get_gpt_layer_local_spec, num_experts=experts, moe_grouped_gemm=False,
            qk_layernorm=config.qk_layernorm, normalization=config.normalization,
            qk_l2_norm=setting(config, "qk_l2_norm", False))
        return spec.submodules

    dense = layer(None)
    norm = dense.input_layernorm
    prediction = mtp.MultiTokenPredictionLayerSubmodules(
        enorm=norm, hnorm=norm, eh_proj=ColumnParallelLinear, mtp_model_layer=None,
        layer_norm=norm)
    return ModuleSpec(module=LocalStack, params={"norm": norm}, submodules=HybridStackSubmodules(
        attention_layer=ModuleSpec(TransformerLayer, submodules=replace(dense, **_NO_MLP)),
        mlp_layer=ModuleSpec(MLPLayer, submodules=replace(dense, **_NO_ATTENTION)),
        moe_layer=ModuleSpec(TransformerLayer, submodules=replace(layer(1), **_NO_ATTENTION)),
        mtp_block_spec=ModuleSpec(
            mtp.MultiTokenPredictionBlock,
            submodules=mtp.MultiTokenPredictionBlockSubmodules(layer_specs=[
                ModuleSpec(mtp.MultiTokenPredictionLayer, submodules=prediction)]))))
