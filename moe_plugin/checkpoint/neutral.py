"""Framework-independent names, shapes and settings of decoder models. In the code, they are called
"neutral".

To convert between all formats, each format needs only one conversion to these names and one
conversion from them. Letters in shapes: D is the width of the model, V the size of the vocabulary,
A the number of query heads, K the number of key and value heads, H the width of a head, P the
number of positions, E the number of experts, F the inner width of an expert or MLP, G the inner
width of the shared expert, and L the latent width.

    embed.weight                         [V, D]
    position.weight                      [P, D]         learned positions only
    layers.N.norm1.weight, bias          [D]            before attention
    layers.N.attention.q.weight          [A*H, D]       rows: heads in order; bias [A*H]
    layers.N.attention.k.weight, v       [K*H, D]       bias [K*H]
    layers.N.attention.o.weight          [D, A*H]       bias [D]
    layers.N.attention.q_norm.weight, k_norm            if queries and keys are normalized: per
                                         head [H], or over all heads [A*H], [K*H]
    layers.N.attention.q_a.weight, q_a_norm, q_b        latent attention, see `LATENT`: D to the
    layers.N.attention.kv_a.weight, kv_a_norm, kv_b     latent width, its norm, to the heads
    layers.N.norm2.weight, bias          [D]            before the MoE layer or MLP
    layers.N.mlp.w_in.weight, w_gate     [F, D]         bias [F]; dense layers
    layers.N.mlp.w_out.weight            [D, F]         bias [D]
    layers.N.moe.router.weight           [E, D]         bias [E]
    layers.N.moe.router.expert_bias      [E]            added to scores, only to choose experts
    layers.N.moe.experts.w_in_LDF, w_gate_LDF           [E, D, F]; y = x w
    layers.N.moe.experts.w_out_LFD       [E, F, D]
    layers.N.moe.experts.bias_in_LF, bias_gate_LF, bias_out_LD   [E, F], [E, F], [E, D]
    layers.N.moe.shared.w_in.weight, w_gate             [G, D]
    layers.N.moe.shared.w_out.weight     [D, G]
    layers.N.moe.shared.gate.weight      [1, D]         scales the shared expert's output
    layers.N.moe.latent.down.weight      [L, D]         around the routed experts, whose rows then
    layers.N.moe.latent.up.weight        [D, L]         have width L instead of D; biases
    final_norm.weight, bias              [D]
    output.weight                        [V, D]         absent if it equals the embedding

For rotary positions, element `i` of a head is paired with element `i + H/2`, as in Hugging Face and
Megatron. Optimizer state is stored under the name of its parameter and has the same shape. The keys
of `Source.layers` are the prefixes `layers.N.moe.`. In a source with framework-independent names,
`values["model"]` is the dict that `DecoderSettings.to_dict()` returns, and `values["step"]` is the
number of optimizer steps. If the source contains optimizer state, `values["optimizer"]` contains
the entries listed in `OPTIMIZER_VALUES`.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from typing import Any

import torch

from moe_plugin.checkpoint.derived import cast, filled
from moe_plugin.checkpoint.source import MODEL, CheckpointError, Derived, Source
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

# common settings of an optimizer's groups; "step" is the number of updates that the optimizer
# counts
OPTIMIZER_VALUES = ("step", "lr", "betas", "eps", "weight_decay", "momentum")

# DeepSeek's latent attention: ranks of the latents of queries (None if queries have no latent) and
# of keys and values; widths of a head's part without and with rotary positions, and of its values;
# whether rotary positions pair neighbors (2i, 2i + 1).
LATENT = ("q_rank", "kv_rank", "plain_dim", "rotary_dim", "value_dim", "interleaved")


@dataclass(frozen=True, kw_only=True)
class DecoderSettings:
    """Settings of a decoder model that cannot be derived from the shapes of its tensors.

    Attributes:
        heads: number of query heads of attention.
        kv_heads: number of key and value heads of attention.
        norm: type of the norms, "layernorm" or "rmsnorm". Both use `norm_eps`.
        pre_norm: whether norms are applied before attention and MLP (True) or after the residual
            addition (False).
        activation: activation function of MLPs and experts; a value of the setting
            `experts.activation`.
        gated: whether MLPs and experts compute `act(x @ w_gate) * (x @ w_in)`.
        gate_clamp, linear_offset: see the settings `experts.clamp` and `experts.linear_offset`.
        weights_first: whether inputs (True) or outputs (False) of the experts are multiplied by the
            routing weights.
        positions: type of the position encoding: "rotary" (with `rotary_base`), "learned",
            "sinusoidal" or "none".
        rotary_part: fraction of each head's width that is rotated. The rotated dimensions are the
            first dimensions of each head.
        tied: whether the embedding matrix is also used as the output matrix.
        embed_scale: factor by which token embeddings are multiplied. Position embeddings are not
            multiplied.
        top_k: number of experts per token, or 0 if the model has no MoE layers.
        router: score function of the router: "softmax", "sigmoid" or "sparsemixer". The router
            "sparsemixer" uses `mixer_eps`, which is also a setting of this package. If
            `normalize_top_k` is True, the scores of the chosen experts are divided by
            `max(sum + normalize_add, normalize_min)`. After normalization, the chosen scores are
            multiplied by `router_scale`.
        groups, group_top_k, group_scores: see the settings `router.groups`, `router.group_top_k`
            and `router.group_scores`. If `groups` is 0, routing is not limited to groups.
        rotary_scaling: scaling of rotary positions, in the form of Hugging Face's `rope_scaling`,
            including its key "rope_type". If positions are not scaled, `rotary_scaling` is empty.
        window: number of previous tokens to which each token can attend, or 0 for all tokens.
        latent: settings of latent attention. The keys are listed in `LATENT`.
        extra: all other settings, under the names that the checkpoint's format uses. If a format
            does not support a setting in `extra`, it raises an error that names the setting.
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
        """Return the settings as JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DecoderSettings:
        """Build settings from a dict that `to_dict` returned. Raise `CheckpointError` if entries
        are missing or unknown.
        """
        known = {setting.name for setting in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise CheckpointError(f"unknown model setting {unknown[0]!r}; known settings: "
                                  f"{sorted(known)}")
        try:
            return cls(**values)
        except TypeError as error:
            raise CheckpointError(f"the model settings are incomplete: {error}") from error


class NeutralModel:
    """A summary of a framework-independent source, computed from its settings and the shapes of its
    tensors.

    Attributes:
        width: width of the model (D).
        vocabulary: size of the vocabulary (V).
        head_dim: width of an attention head (H).
        dense: indices of the layers with an MLP.
        moe: indices of the layers with experts.
        layers: total number of layers.
        experts: number of experts (E), or 0 if the model has no experts.
        expert_width, shared_width, dense_width: inner widths of each expert (F), of the shared
            expert (G), and of a dense MLP (F). A width is 0 if the model has no such layer.
        biases: which linear layers of attention have biases: "none", "qkv" or "all".
        qk_norm: normalization of queries and keys: "none", "head" for each head separately, or
            "all" for all heads together.
        shared: type of the shared expert: "none", "plain" or "gated".
        dtype: data type of the embedding matrix.
    Raises:
        CheckpointError: If the source is not a complete model.
    """

    def __init__(self, source: Source) -> None:
        self.settings = s = DecoderSettings.from_dict(source.values["model"])
        shapes = {name: entry.shape for (kind, name), entry in source.entries.items()
                  if kind == MODEL}
        if "embed.weight" not in shapes or "layers.0.norm1.weight" not in shapes:
            raise CheckpointError("the source has no embedding or no layer 0, so it is not a "
                                  "complete model")

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
        """Return the number of expert scores that are added to obtain the score of a group, or None
        if there are no groups.
        """
        s = self.settings
        return None if not s.groups else s.group_scores or max(1, s.top_k // s.group_top_k)


def unfit(model: DecoderSettings, checks: Iterable[tuple[str, bool, str]], held: Container[str],
          extra: Container[str]) -> list[str]:
    """Return the settings of a model that a format does not support, with the values that it
    allows.

    Args:
        model: settings of the model.
        checks: a tuple for each checked setting: its name, whether its value is allowed, and a
            description of the allowed values.
        held: names of the settings that the format can represent. All other settings must have
            their default values.
        extra: keys of `model.extra` that the format supports.
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
    """Raise `CheckpointError` for the first name that is not a framework-independent name."""
    for name in names:
        if not NAMES.fullmatch(name):
            raise CheckpointError(f"tensor {name!r} has no framework-independent name, so the "
                                  "checkpoint cannot be converted to another format; use the "
                                  "checkpoint's own format as the target")


def zeros(like: Derived, name: str) -> Derived:
    """Return a zero bias with one element for each row of a matrix."""
    return filled((like.key[0], name), like.entry.shape[:1], like.entry.dtype)


def is_zero(source: Source, name: str) -> bool:
    """Return true if a small tensor is all zeros, both in the model and in the optimizer state."""
    return not any(bool(source.read(key).any()) for key in source.entries if key[1] == name)


def masters(source: Source) -> list[Derived]:
    """Return float32 master copies of all 16-bit parameters that have optimizer state. If the
    source already contains master copies, return an empty list.
    """
    trained = {name for field, name in source.entries if field != MODEL}
    if any(field == "master" for field, _ in source.entries):
        return []
    found = (source.tensor((MODEL, name)) for name in trained)
    return [replace(cast(one, torch.float32), key=("master", one.key[1])) for one in found
            if one.entry.dtype in (torch.float16, torch.bfloat16)]
