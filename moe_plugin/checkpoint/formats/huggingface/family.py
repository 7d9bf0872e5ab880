"""Description of a model family in Hugging Face's `transformers`.

A family describes the names and the settings of the MoE block and of the surrounding decoder. The
module `families` contains all families.
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
    """Return a mapping from neutral names to the names of a shared expert's tensors."""
    return {f"shared.{ours}.{kind}": f"{module}.{theirs}.{kind}"
            for ours, theirs in _MLP.items() for kind in ("weight", "bias")}


@dataclass(frozen=True, kw_only=True)
class Block:
    """Description of the MoE block of a family. Names are also set for parts that a model may lack,
    such as biases and a shared expert.

    Attributes:
        module: name of the MoE block within a decoder layer of the model.
        module_in_files: name of the MoE block in files, if this name differs from `module`.
        names: names of tensors within the MoE block, by their neutral names after the prefix
            `layers.N.moe.`.
        gate_up, down: names of the tensors that contain all experts. `gate_up` contains gate and
            input matrices [E, 2F, D], or only input matrices [E, F, D] if experts have no gates.
            `down` contains output matrices [E, D, F]. The names of the biases end in `_bias`.
        transposed: whether the last two axes of `gate_up` and `down` are exchanged.
        in_turn: whether the rows of gate and input matrices alternate. Otherwise all gate rows come
            before all input rows.
        files: names that replace `names`, `gate_up` and `down` in files if these differ from the
            model.
        parts: names (PART) of the gate, input and output matrix of each expert in files, where
            tensors are named `experts.E.PART.weight`. It is empty if each tensor in the files
            contains all experts.
        bias_row: whether `router.expert_bias` is stored as a matrix [1, E].
        gated: whether the experts have gate matrices.
        shared: "none", "plain" or "gated".
        scores: function that computes the scores, "softmax" or "sigmoid", or the separate router
            "sparsemixer".
        expert_bias: whether a bias is added to the scores when experts are chosen.
        normalize: the only supported value of `normalize_top_k`, or None if the configuration sets
            it.
        normalize_add: constant that is added to the sum of the chosen weights before the division.
            (If the chosen experts have the largest softmax scores, the sum is so large that the
            constant has no effect.)
        normalize_min: key in `config.json` of the minimal divisor, or an empty string if there is
            no minimum.
        scales: whether the weights are multiplied by a factor from the configuration.
        methods: supported values of `topk_method` in `config.json`. The first value is the default.
        group_scores: number of expert scores that are added to get the score of a group, or None if
            there are no groups.
        keys: keys in `config.json` that differ from `KEYS`, including the key of `gate_clamp`,
            which most families do not have.
        settings: neutral settings that all models of the family have.
        needs: values that settings in `config.json` must have. Otherwise this description does not
            apply.
        float32: name prefixes of tensors in the MoE block that `transformers` keeps in float32.
        pair: whether the MoE block returns the router's logits together with the output.
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
        """Return the key in `config.json` of a neutral setting."""
        return self.keys.get(setting, KEYS[setting])


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """Description of the part of a model around the MoE blocks. It exists for families whose whole
    models can be converted to neutral names.

    Attributes:
        dense: which layers may be dense: "none", "any", or only the "first" layers.
        biases: which linear layers of the attention may have biases: "none", "qkv" or "all".
        mlp_bias: whether the MLPs of dense layers may have biases.
        bias_key: key in `config.json` that enables biases of the attention, or an empty string if
            no setting enables them.
        qk_norm: supported normalization of queries and keys: "none", over each "head" or over "all"
            heads.
        latent: whether the family uses latent attention.
        window: whether attention may be limited to a number of previous tokens.
        part: whether rotary positions may be applied to only a part of each head.
        defaults: values of settings that may be missing in `config.json`.
        extras: names of further settings that the family supports.
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
    """A model family, which consists of all models with the same `model_type`.

    Attributes:
        model_type: value of `model_type` in `config.json`.
        architecture: class of the model with a language-model head.
        title: name and publisher of the family.
        also: further values of `model_type` in published checkpoints that are read. Written models
            always have the value `model_type`.
        block: description of the MoE layers, or None for a dense model.
        decoder: description of the part around the MoE layers, or None if this part has no neutral
            names.
        alone: the reason why the part around the MoE layers has no neutral names.
    """

    model_type: str
    architecture: str
    title: str
    also: tuple[str, ...] = ()
    block: Block | None = None
    decoder: Decoder | None = None
    alone: str = ""
