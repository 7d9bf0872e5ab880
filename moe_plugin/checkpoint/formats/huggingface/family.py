"""Description of a model family in Hugging Face's `transformers`.

A family describes the names and settings of its MoE block and of the surrounding decoder. The
module `families` lists all families.
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
    """Return the names of a shared expert's tensors, keyed by framework-independent name."""
    return {f"shared.{ours}.{kind}": f"{module}.{theirs}.{kind}"
            for ours, theirs in _MLP.items() for kind in ("weight", "bias")}


@dataclass(frozen=True, kw_only=True)
class Block:
    """Description of the MoE block of a family. The description also lists the names of optional
    tensors, such as biases and a shared expert.

    Attributes:
        module: name of the MoE block within a decoder layer.
        module_in_files: name of the MoE block in checkpoint files, if it differs from `module`.
        names: names of the tensors within the MoE block. The keys are framework-independent names
            without the prefix `layers.N.moe.`.
        gate_up, down: names of the two tensors that contain matrices of all experts. `gate_up`
            contains the gate and input matrices [E, 2F, D], or only the input matrices [E, F, D] if
            the experts have no gates. `down` contains the output matrices [E, D, F]. The names of
            the biases end in `_bias`.
        transposed: whether the last two axes of `gate_up` and `down` are swapped.
        in_turn: whether the rows of the gate matrix and of the input matrix alternate. If `in_turn`
            is False, the rows of the gate matrix precede the rows of the input matrix.
        files: the names in checkpoint files for those entries of `names`, `gate_up` and `down` that
            have a different name in the model.
        parts: names of an expert's gate, input and output matrices in checkpoint files, that is,
            PART in `experts.E.PART.weight`. The tuple is empty if each tensor in the files contains
            all experts.
        bias_row: whether `router.expert_bias` is stored with the shape [1, E].
        gated: whether the experts have gate matrices.
        shared: type of shared expert: "none", "plain" or "gated".
        scores: score function of the router: "softmax", "sigmoid", or "sparsemixer" for the router
            SparseMixer.
        expert_bias: whether experts are chosen by the sum of their scores and a bias.
        normalize: the value of `normalize_top_k` in all models of the family, or None if
            `config.json` contains this setting.
        normalize_add: constant that is added to the sum of the chosen weights before dividing by
            the sum. The constant does not change the result if the chosen experts have the largest
            softmax scores, because the sum of these scores is then large enough.
        normalize_min: key in `config.json` of the minimum divisor, or an empty string if there is
            no minimum.
        scales: whether the weights are multiplied by a factor from `config.json`.
        methods: supported values of `topk_method` in `config.json`. The first value is the default.
        group_scores: number of expert scores that are added to obtain the score of a group, or None
            if there are no groups.
        keys: keys of settings whose name in `config.json` differs from the name in `KEYS`. The key
            of `gate_clamp`, which most families do not have, must also be listed here.
        settings: framework-independent settings that are equal in all models of the family.
        needs: settings that must have these values in `config.json`. For other values, this
            description of the MoE block is not valid.
        float32: name prefixes of the MoE block's tensors that `transformers` keeps in float32.
        pair: whether the MoE block returns a pair of the output and the router's logits.
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
        """Return the key in `config.json` for a framework-independent setting."""
        return self.keys.get(setting, KEYS[setting])


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """Description of the layers around the MoE blocks of a model. A family has a `Decoder` only if
    complete models of the family can be converted to framework-independent names.

    Attributes:
        dense: which layers may be dense: "none", "any", or "first" if only the first layers may be
            dense.
        biases: which linear layers of attention may have biases: "none", "qkv" or "all".
        mlp_bias: whether the MLPs of dense layers may have biases.
        bias_key: key in `config.json` that enables attention biases, or an empty string if no
            setting enables them.
        qk_norm: supported normalization of queries and keys: "none", "head" for each head
            separately, or "all" for all heads together.
        latent: whether the family uses latent attention.
        window: whether attention may be restricted to a number of previous tokens (sliding window).
        part: whether rotary position embeddings may be applied to only some of the dimensions of
            each head.
        defaults: default values of settings that may be missing in `config.json`.
        extras: names of additional settings that the family supports.
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
    """A model family. All models of a family have the same `model_type`.

    Attributes:
        model_type: value of `model_type` in `config.json`.
        architecture: name of the model class with a language-model head.
        title: name and publisher of the family.
        also: other values of `model_type` in published checkpoints of this family. Checkpoints with
            these values can be read. Written checkpoints always use the value `model_type`.
        block: description of the MoE blocks, or None for a family of dense models.
        decoder: description of the layers around the MoE blocks, or None if these layers have no
            framework-independent names.
        alone: reason why the layers around the MoE blocks have no framework-independent names.
    """

    model_type: str
    architecture: str
    title: str
    also: tuple[str, ...] = ()
    block: Block | None = None
    decoder: Decoder | None = None
    alone: str = ""
