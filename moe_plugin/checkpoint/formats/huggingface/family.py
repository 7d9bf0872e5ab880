"""Description of a model family in Hugging Face's `transformers`.

A family describes names and settings of the MoE block and of the surrounding decoder. `families`
lists all families.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# keys of `config.json` by neutral settings, and by sizes
KEYS = {"top_k": "num_experts_per_tok", "normalize_top_k": "norm_topk_prob",
        "router_scale": "routed_scaling_factor", "groups": "n_group", "group_top_k": "topk_group",
        "activation": "hidden_act", "mixer_eps": "mixer_eps", "experts": "num_experts",
        "width": "moe_intermediate_size"}
GATE = {"router.weight": "gate.weight"}
GATE_BIAS = {**GATE, "router.expert_bias": "gate.e_score_correction_bias"}
_MLP = {"w_gate": "gate_proj", "w_in": "up_proj", "w_out": "down_proj"}


def shared_names(module: str) -> dict[str, str]:
    """Return the names of a shared expert's tensors by neutral names."""
    return {f"shared.{ours}.{kind}": f"{module}.{theirs}.{kind}"
            for ours, theirs in _MLP.items() for kind in ("weight", "bias")}


@dataclass(frozen=True, kw_only=True)
class Block:
    """The MoE block of a family. Names are also set for parts that a model may lack, such as biases
    and a shared expert.

    Attributes:
        module: name of the block in a decoder layer of the model.
        module_in_files: name of the block in files, if it differs from `module`.
        names: names of tensors below the module, by neutral names below `layers.N.moe.`.
        gate_up, down: names of the tensors of all experts: gates and inputs ([E, 2F, D]; inputs of
            experts without gates [E, F, D]), and outputs [E, D, F]; the names of their biases end
            in `_bias`.
        transposed: the last two axes of `gate_up` and `down` are exchanged.
        in_turn: rows of gates and inputs alternate, instead of all gates followed by all inputs.
        files: names that replace `names`, "gate_up" and "down" if files differ from the model.
        parts: names of gate, input and output matrix of each expert in files
            (`experts.E.PART.weight`); () if files have tensors of all experts.
        bias_row: `router.expert_bias` is a matrix [1, E].
        gated: experts have gates.
        shared: "none", "plain" or "gated".
        scores: "softmax", "sigmoid", or "sparsemixer", which is a separate router.
        expert_bias: a bias is added to the scores to choose experts.
        normalize: the only supported `normalize_top_k`, or None if the configuration sets it.
        normalize_add: constant that is added to the sum of the chosen weights before the division.
            (With the largest softmax scores, the sum is so large that the constant has no effect.)
        normalize_min: key in `config.json` of the minimal divisor; "" for no minimum.
        scales: the weights have a factor.
        methods: supported values of `topk_method` in `config.json`; the first value is the default.
        group_scores: number of scores that make up a group's score; None without groups.
        keys: keys of `config.json` that differ from `KEYS`, including `gate_clamp`, which other
            families do not read.
        settings: neutral settings that all models of the family have.
        needs: values that settings of `config.json` must have for this description to apply.
        float32: name prefixes in the block that `transformers` keeps in float32.
        pair: the block also returns the router's logits.
    """

    module: str = "mlp"
    module_in_files: str = ""
    names: Mapping[str, str] = field(default_factory=lambda: GATE)
    gate_up: str = "experts.gate_up_proj"
    down: str = "experts.down_proj"
    transposed: bool = False
    in_turn: bool = False
    files: Mapping[str, str] = field(default_factory=dict)
    parts: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    bias_row: bool = False
    gated: bool = True
    shared: str = "none"
    scores: str = "softmax"
    expert_bias: bool = False
    normalize: bool | None = None
    normalize_add: float = 1e-20
    normalize_min: str = ""
    scales: bool = False
    methods: tuple[str, ...] = ()
    group_scores: int | None = None
    keys: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    needs: Mapping[str, Any] = field(default_factory=dict)
    float32: tuple[str, ...] = ()
    pair: bool = False

    def key(self, setting: str) -> str:
        """Return the key of a neutral setting in `config.json`."""
        return self.keys.get(setting, KEYS[setting])


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """The part of a model around the MoE block, in families whose whole models have a neutral form.

    Attributes:
        dense: layers that may be dense: "none", "any", "first".
        biases: supported biases of attention: "none", "qkv" or "all".
        mlp_bias: dense layers may have biases.
        bias_key: key in `config.json` that enables biases of attention; "" if they are fixed.
        qk_norm: supported norms of queries and keys: "none", "head" or "all".
        latent: attention uses latents.
        window: attention may be limited to a number of previous tokens.
        part: rotary positions may apply to a part of each head.
        defaults: settings that `config.json` may leave out.
        extras: further settings that the family supports.
    """

    dense: str = "none"
    biases: tuple[str, ...] = ("none",)
    bias_key: str = "attention_bias"
    mlp_bias: bool = False
    qk_norm: tuple[str, ...] = ("none",)
    latent: bool = False
    window: bool = False
    part: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    extras: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family: all models with one `model_type`.

    Attributes:
        model_type: `model_type` in `config.json`.
        architecture: class of the model with a language-model head.
        title: name and publisher.
        also: other `model_type`s of published checkpoints; written models always have `model_type`.
        block: the MoE layers, or None for a dense model.
        decoder: the part around the MoE layers, or None if it has no neutral form.
        alone: the reason why the part around the MoE layers has no neutral form.
    """

    model_type: str
    architecture: str
    title: str
    also: tuple[str, ...] = ()
    block: Block | None = None
    decoder: Decoder | None = None
    alone: str = ""
