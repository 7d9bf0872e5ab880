"""Names, shapes and settings of a decoder model that belong to no framework.

Formats convert to these names and from them, so that n formats need 2n views. D is the width, V the
vocabulary, A the attention heads, K the heads of keys and values, H the width of a head, P the
positions, E the experts, F the width inside an expert or MLP, G the shared expert's.

    embed.weight                         [V, D]
    position.weight                      [P, D]         learned positions alone
    layers.N.norm1.weight, bias          [D]            before attention
    layers.N.attention.q.weight          [A*H, D]       rows: heads in order; bias [A*H]
    layers.N.attention.k.weight, v       [K*H, D]       bias [K*H]
    layers.N.attention.o.weight          [D, A*H]       bias [D]
    layers.N.attention.q_norm.weight, k_norm            where queries and keys are normalized: each
                                         head [H], or all heads at once [A*H], [K*H]
    layers.N.attention.q_a.weight, q_a_norm, q_b        latent attention, see `LATENT`: D to the
    layers.N.attention.kv_a.weight, kv_a_norm, kv_b     latent width, its norm, to the heads
    layers.N.norm2.weight, bias          [D]            before the MoE layer or MLP
    layers.N.mlp.w_in.weight, w_gate     [F, D]         bias [F]; dense layers
    layers.N.mlp.w_out.weight            [D, F]         bias [D]
    layers.N.moe.router.weight           [E, D]         bias [E]
    layers.N.moe.router.expert_bias      [E]            added to scores for the choice alone
    layers.N.moe.experts.w_in_LDF, w_gate_LDF           [E, D, F]; y = x w
    layers.N.moe.experts.w_out_LFD       [E, F, D]
    layers.N.moe.experts.bias_in_LF, bias_gate_LF, bias_out_LD   [E, F], [E, F], [E, D]
    layers.N.moe.shared.w_in.weight, w_gate             [G, D]
    layers.N.moe.shared.w_out.weight     [D, G]
    layers.N.moe.shared.gate.weight      [1, D]         scales the shared expert's output
    layers.N.moe.latent.down.weight      [L, D]         around the routed experts, whose rows then
    layers.N.moe.latent.up.weight        [D, L]         are of width L in the place of D; biases
    final_norm.weight, bias              [D]
    output.weight                        [V, D]         absent where it is the embedding

Rotary positions pair element i of a head with i + H/2 (as Hugging Face and Megatron do). Optimizer
fields have the same names and shapes. A source's `layers` has the prefixes `layers.N.moe.`, its
`values["model"]` is `DecoderSettings.to_dict()`, `values["step"]` the number of updates,
`values["optimizer"]` what `OPTIMIZER_VALUES` names, where there is optimizer state.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from typing import Any

import torch

from moe_plugin.checkpoint.source import (
    MODEL,
    CheckpointError,
    Derived,
    Source,
    cast,
    filled,
)
from moe_plugin.utils.messages import short

NEUTRAL = "neutral"  # `Source.format` of views with these names

_NORM = r"(?:weight|bias)"
NAMES = re.compile("|".join((
    r"embed\.weight", r"position\.weight", r"output\.weight", rf"final_norm\.{_NORM}",
    rf"layers\.\d+\.norm[12]\.{_NORM}",
    r"layers\.\d+\.attention\.(?:q|k|v|o)\.(?:weight|bias)",
    rf"layers\.\d+\.attention\.(?:q_norm|k_norm|q_a_norm|kv_a_norm)\.{_NORM}",
    r"layers\.\d+\.attention\.(?:q_a|q_b|kv_a|kv_b)\.(?:weight|bias)",
    r"layers\.\d+\.mlp\.(?:w_in|w_gate|w_out)\.(?:weight|bias)",
    r"layers\.\d+\.moe\.router\.(?:weight|bias|expert_bias)",
    r"layers\.\d+\.moe\.experts\.(?:w_in_LDF|w_gate_LDF|w_out_LFD|bias_in_LF|bias_gate_LF|bias_out_LD)",
    r"layers\.\d+\.moe\.shared\.(?:w_in|w_gate|w_out|gate)\.(?:weight|bias)",
    r"layers\.\d+\.moe\.latent\.(?:down|up)\.(?:weight|bias)",
)))

# of an optimizer's groups: of all parameters alike; "step": updates that it counts
OPTIMIZER_VALUES = ("step", "lr", "betas", "eps", "weight_decay", "momentum")

# DeepSeek's latent attention: ranks of the latents of queries (None: none) and of keys and values;
# widths of a head's part without and with rotary positions, and of its values; whether rotary
# positions pair neighbours (2i, 2i + 1).
LATENT = ("q_rank", "kv_rank", "plain_dim", "rotary_dim", "value_dim", "interleaved")


@dataclass(frozen=True, kw_only=True)
class DecoderSettings:
    """What a decoder model computes, as far as its tensors' shapes do not say it.

    Attributes:
        heads, kv_heads: attention heads; those of keys and values.
        norm: "layernorm" or "rmsnorm", with `norm_eps`.
        pre_norm: norms come before attention and MLP, not after their residual.
        activation: of MLP and experts, by its name in `experts.activation`.
        gated: MLP and experts are act(x w_gate) * (x w_in).
        gate_clamp, linear_offset: as `experts.clamp`, `experts.linear_offset` of our settings.
        weights_first: experts' inputs are multiplied by the weights, not their outputs.
        positions: "rotary" (with `rotary_base`), "learned", "sinusoidal" or "none".
        rotary_part: of a head's width, what is turned; the rest comes behind it.
        tied: the output matrix is the embedding.
        embed_scale: embeddings (not positions) are multiplied by it.
        top_k: experts per token; 0 without MoE layers.
        router: "softmax" or "sigmoid" scores, or "sparsemixer", with `mixer_eps` of our settings;
            `normalize_top_k`: the chosen ones are divided by max(sum + `normalize_add`,
            `normalize_min`), then times `router_scale`.
        groups, group_top_k, group_scores: as `router.groups`, ... of our settings; 0 groups: none.
        rotary_scaling: how rotary positions are stretched, as `rope_scaling` of Hugging Face with
            "rope_type"; empty: not at all.
        window: tokens that attention looks back; 0: all.
        latent: `LATENT` by name, where attention is latent.
        extra: settings that a format knows and this list does not, by the format's own names; a
            format refuses by name what it does not hold.
    """

    heads: int
    kv_heads: int
    norm: str
    norm_eps: float
    activation: str
    gated: bool
    positions: str
    tied: bool
    pre_norm: bool = True
    gate_clamp: float = 0.0
    linear_offset: float = 0.0
    weights_first: bool = False
    rotary_base: float = 10000.0
    rotary_part: float = 1.0
    max_positions: int = 0
    embed_scale: float = 1.0
    top_k: int = 0
    router: str = "softmax"
    normalize_top_k: bool = False
    normalize_add: float = 1e-20
    normalize_min: float = 0.0
    router_scale: float = 1.0
    mixer_eps: float = 0.01
    groups: int = 0
    group_top_k: int = 1
    group_scores: int = 0
    rotary_scaling: Mapping[str, Any] = field(default_factory=dict)
    window: int = 0
    latent: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DecoderSettings:
        """From `to_dict`; `CheckpointError` where an entry is missing or unknown."""
        known = {one.name for one in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise CheckpointError(f"unknown model setting {unknown[0]!r}; known: {sorted(known)}")
        try:
            return cls(**values)
        except TypeError as error:
            raise CheckpointError(f"incomplete model settings: {error}") from error


class NeutralModel:
    """What a neutral source holds, by its settings and the shapes of its tensors.

    Attributes:
        width, vocabulary: D, V.
        head_dim: H.
        dense, moe: numbers of the layers with an MLP, and with experts.
        layers: how many in all.
        experts, expert_width, shared_width, dense_width: E, F, G, F; 0 where there are none.
        biases: of attention: "none", "qkv" or "all".
        qk_norm: "none", "head" or "all".
        shared: "none", "plain" or "gated".
        dtype: of the embedding.
    Raises:
        CheckpointError: it is no whole model.
    """

    def __init__(self, source: Source) -> None:
        self.settings = s = DecoderSettings.from_dict(source.values["model"])
        shapes = {name: entry.shape for (kind, name), entry in source.entries.items()
                  if kind == MODEL}
        if "embed.weight" not in shapes or "layers.0.norm1.weight" not in shapes:
            raise CheckpointError("the source has no embedding or no layer 0: it is no whole model")

        def size(name: str, axis: int = 0) -> int:
            return shapes[name][axis] if name in shapes else 0

        self.vocabulary, self.width = shapes["embed.weight"]
        self.dtype = str(source.entries[MODEL, "embed.weight"].dtype).removeprefix("torch.")
        self.dense, self.moe = (tuple(sorted(
            int(name.split(".")[1]) for name in shapes if name.endswith(end)))
            for end in (".mlp.w_in.weight", ".moe.experts.w_in_LDF"))
        self.layers = len(self.dense) + len(self.moe)
        attention = "layers.0.attention."
        self.head_dim = size(f"{attention}q.weight") // s.heads
        normed = size(f"{attention}q_norm.weight")
        self.qk_norm = "none" if not normed else "head" if normed == self.head_dim else "all"
        everywhere = any(f"{attention}{part}.bias" in shapes for part in ("o", "kv_a"))
        self.biases = ("all" if everywhere else
                       "qkv" if f"{attention}q.bias" in shapes else "none")
        mlp, moe = (f"layers.{(numbers or '-')[0]}." for numbers in (self.dense, self.moe))
        self.mlp_bias = f"{mlp}mlp.w_in.bias" in shapes
        self.dense_width = size(f"{mlp}mlp.w_in.weight")
        self.experts, self.expert_width = (size(f"{moe}moe.experts.w_in_LDF", at) for at in (0, 2))
        self.expert_bias = f"{moe}moe.router.expert_bias" in shapes
        self.shared_width = size(f"{moe}moe.shared.w_in.weight")
        self.shared = ("none" if not self.shared_width else
                       "gated" if f"{moe}moe.shared.gate.weight" in shapes else "plain")

    @property
    def group_scores(self) -> int | None:
        """How many scores make a group's; None: no groups."""
        s = self.settings
        return None if not s.groups else s.group_scores or max(1, s.top_k // s.group_top_k)


def unfit(model: DecoderSettings, checks: Iterable[tuple[str, bool, str]], held: Container[str],
          extra: Container[str]) -> list[str]:
    """What of a model a format cannot have, each with what it must be.

    Args:
        checks: of settings: name, whether it fits, what it must be.
        held: settings that the format has a form of; others must be at their default.
        extra: those of `model.extra` that it knows.
    """
    values = vars(model)
    wrong = [(name, values[name], choices) for name, fits, choices in checks if not fits]
    wrong += [(name, value, "unset") for name, value in model.extra.items() if name not in extra]
    for one in fields(model):
        default = one.default if one.default_factory is MISSING else one.default_factory()
        if one.name not in held and values[one.name] != default:
            wrong.append((one.name, values[one.name], short(default)))
    return [f"{name}={short(value)} (must be {choices})" for name, value, choices in wrong]


def check_names(names: Any) -> None:
    """`CheckpointError` for the first name that is not a neutral one."""
    for name in names:
        if not NAMES.fullmatch(name):
            raise CheckpointError(f"tensor {name!r} has no neutral name, so that it cannot become "
                                  "another format's; convert to the checkpoint's own format")


def zeros(like: Derived, name: str) -> Derived:
    """A vector of zeros, one for each row of a matrix: a bias that changes nothing."""
    return filled((like.key[0], name), like.entry.shape[:1], like.entry.dtype)


def is_zero(source: Source, name: str) -> bool:
    """Whether a small tensor is zero in every field that has it."""
    return not any(bool(source.read(key).any()) for key in source.entries if key[1] == name)


def masters(source: Source) -> list[Derived]:
    """Float32 copies of 16-bit parameters that optimizer state is for, where there are none."""
    trained = {name for field, name in source.entries if field != MODEL}
    if any(field == "master" for field, _ in source.entries):
        return []
    found = (source.tensor((MODEL, name)) for name in trained)
    return [replace(cast(one, torch.float32), key=("master", one.key[1])) for one in found
            if one.entry.dtype in (torch.float16, torch.bfloat16)]
