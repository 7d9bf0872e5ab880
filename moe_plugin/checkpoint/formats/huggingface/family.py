"""What a family of models in Hugging Face's `transformers` is: names and settings of its MoE block,
and what surrounds it. `families` lists them.
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
    """Names of a shared expert, by neutral ones."""
    return {f"shared.{ours}.{kind}": f"{module}.{theirs}.{kind}"
            for ours, theirs in _MLP.items() for kind in ("weight", "bias")}


@dataclass(frozen=True, kw_only=True)
class Block:
    """The MoE block of a family. What it may lack (biases, shared expert) is named all the same.

    Attributes:
        module: of a decoder layer, in the model.
        module_in_files: in files, where another.
        names: of tensors below the module, by neutral names below `layers.N.moe.`.
        gate_up, down: of all experts in one tensor: gates and inputs ([E, 2F, D]; plain experts'
            inputs [E, F, D]), outputs [E, D, F]; biases are called the same with `_bias`.
        transposed: these have their last two axes the other way round.
        in_turn: gates and inputs take turns along the axis, in place of one behind the other.
        files: in the place of `names`, "gate_up" and "down" where files differ from the model.
        parts: in files, of each expert by itself, `experts.E.PART.weight` of gate, input and output
            matrix; (): files have the tensors of all experts.
        bias_row: `router.expert_bias` is a matrix [1, E].
        gated: an expert has a gate.
        shared: "none", "plain" or "gated".
        scores: "softmax", "sigmoid", or "sparsemixer", a router of its own.
        expert_bias: one is added for the choice.
        normalize: `normalize_top_k` that it can have; None: the configuration says it.
        normalize_add: what is added to the sum of the weights of the chosen before it divides them.
            (A softmax whose largest scores are chosen sums to so much that it has no effect.)
        normalize_min: key of `config.json` of the least number that divides them; "": none.
        scales: has a factor on the weights.
        methods: values of `topk_method` in `config.json`; the first where it has none.
        group_scores: with groups, how many scores make a group's; None: no groups.
        keys: of `config.json`, where they differ from `KEYS`; of `gate_clamp`, which other families
            do not read.
        settings: neutral settings that all its models have.
        needs: values that settings of `config.json` must have, to be what is said here.
        float32: beginnings of names in the block that `transformers` keeps in float32.
        pair: the block returns the router's logits, too.
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
        """The key of a neutral setting in `config.json`."""
        return self.keys.get(setting, KEYS[setting])


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """What surrounds the MoE block, in families whose whole models have a neutral form.

    Attributes:
        dense: which layers may be dense: "none", "any", "first".
        biases: of attention: "none", "qkv" or "all", which of them.
        mlp_bias: of dense layers.
        bias_key: of `config.json`, whether attention has biases; "": always or never.
        qk_norm: "none", "head" or "all", which of them.
        latent: attention has latents.
        window: may look back a number of tokens.
        part: may turn a part of each head alone.
        defaults: settings that `config.json` may leave out.
        extras: more settings that it holds.
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
    """What the models of one `model_type` can hold.

    Attributes:
        architecture: class of the model with a language-model head.
        title: what it is called, and by whom it was published.
        also: other `model_type`s that published checkpoints of it have; it is written as its own.
        block: its MoE layers; None: it is dense.
        decoder: what surrounds them; None: it has no neutral form, because of `alone`.
    """

    model_type: str
    architecture: str
    title: str
    also: tuple[str, ...] = ()
    block: Block | None = None
    decoder: Decoder | None = None
    alone: str = ""
