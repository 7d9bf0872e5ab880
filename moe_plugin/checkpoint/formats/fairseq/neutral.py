"""Upcycling of fairseq's dense language models and translation models.

For decoder language models, this module converts the tensors and settings of a dense model to a
framework-independent form. After upcycling, this module converts the Mixture-of-Experts model back
to fairseq's names. The models may be dense or have this package's MoE layers.

    neutral                      fairseq, below `decoder.`
    embed, output, final_norm    embed_tokens, output_projection, layer_norm
    position                     embed_positions, after the rows up to the padding row
    attention.q, k, v, o         self_attn.q_proj, k_proj, v_proj (joined in older releases:
                                 self_attn.in_proj_weight), out_proj
    norm1, norm2                 self_attn_layer_norm, final_layer_norm
    mlp.w_in, w_out              fc1, fc2
    moe                          moe_layer.moe

The optimizer state of a parameter is stored under the parameter's name. If a model of another
format has no biases, they are set to zero in fairseq's model. The padding rows of the position
embeddings are set to zero as well.

The tensors of translation models keep fairseq's names, because no other format supports encoders.
Only the tensors of the feed-forward networks change.
"""

from __future__ import annotations

import logging
import math
import re
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from moe_plugin.checkpoint.derived import filled, joined, part_of
from moe_plugin.checkpoint.formats.fairseq import files
from moe_plugin.checkpoint.formats.fairseq.entries import (
    ACTIVATIONS,
    CRITERION,
    OPTIMIZER,
    PARAMETERS,
    STATE,
    plain_value,
)
from moe_plugin.checkpoint.layers import LAYER_NAMES, NEUTRAL_NAMES, layer_settings
from moe_plugin.checkpoint.name_table import KINDS, NameRule, NameTable, both_kinds, same_parts
from moe_plugin.checkpoint.neutral import NEUTRAL, DecoderSettings, NeutralModel, zeros
from moe_plugin.checkpoint.reshard import COLUMNS, GROUPS
from moe_plugin.checkpoint.source import MODEL, CheckpointError, Derived, Source, View
from moe_plugin.checkpoint.upcycle import Upcycling, moe_tensors, refuse_experts, tell_left_out
from moe_plugin.config import flatten
from moe_plugin.config.flags import setting_specs
from moe_plugin.utils.messages import short

POSITIONS = "decoder.embed_positions.weight"
PADDING_ROWS = 2  # fairseq's positions start after the number of the padding word, which is 1
_BUFFERS = {"decoder.version": 3.0, "decoder.embed_positions._float_tensor": 0.0}
_OUTER = {"decoder.embed_tokens.weight": "embed.weight", POSITIONS: "position.weight",
          "decoder.output_projection.weight": "output.weight",
          "decoder.layer_norm.weight": "final_norm.weight",
          "decoder.layer_norm.bias": "final_norm.bias"}
_INNER = {"self_attn.k_proj": "attention.k", "self_attn.v_proj": "attention.v",
          "self_attn.q_proj": "attention.q", "self_attn.out_proj": "attention.o",
          "self_attn_layer_norm": "norm1", "fc1": "mlp.w_in", "fc2": "mlp.w_out",
          "final_layer_norm": "norm2"}  # in the order of a layer's parameters
_WEIGHT = re.compile(rf"(layers\.\d+\.(?:{'|'.join(_INNER.values())}))\.weight")
_MOE = "moe_layer.moe."
_RULES = (
    *same_parts("", "", _OUTER),
    *same_parts("decoder.layers.{n}.", "layers.{n}.", both_kinds(_INNER)),
    *same_parts(f"decoder.layers.{{n}}.{_MOE}", "layers.{n}.moe.", NEUTRAL_NAMES),
)
_WRITTEN = NameTable(_RULES)
_READ = NameTable((*_RULES, *(
    NameRule(f"decoder.layers.{{n}}.self_attn.in_proj_{kind}",
         tuple(f"layers.{{n}}.attention.{part}.{kind}" for part in "qkv")) for kind in KINDS)))


def our_prefix(prefix: str) -> str:
    """Convert a prefix such as `layers.N.moe.` to `decoder.layers.N.moe_layer.moe.`."""
    return f"decoder.{prefix.removesuffix('moe.')}{_MOE}"


def neutral_tensors(source: Source, tied: bool) -> Iterator[Derived]:
    """Yield the tensors of a `fairseq` source under framework-independent names.

    Args:
        source: the source.
        tied: whether the output matrix is the same as the embedding matrix. If `tied` is True, the
            output matrix is not yielded.
    """
    found = (source.tensor(key) for key in source.entries if key[1] not in _BUFFERS
             and not (tied and key[1] == "decoder.output_projection.weight"))
    return _READ.neutral((part_of(one, (slice(PADDING_ROWS, one.entry.shape[0]),))
                          if one.key[1] == POSITIONS else one for one in found), _without_name)


def _without_name(tensor: Derived) -> Derived:
    name = tensor.key[1]
    if width := re.search(r"\bproject_(in|out)_dim\b", name):
        raise CheckpointError(
            f"tensor {name!r} projects embeddings of another width (fairseq's default width is 512 "
            "for any --decoder-embed-dim), and such a model cannot be upcycled; train with "
            f"--decoder-{width[1]}put-dim equal to --decoder-embed-dim")
    raise CheckpointError(f"tensor {name!r} cannot be upcycled: only decoder language models "
                          "(transformer_lm) with the standard tensors are supported")


def fairseq_tensors(source: Source) -> Iterator[Derived]:
    """Yield the tensors of a framework-independent source under fairseq's names."""
    tensors = [source.tensor(key) for key in source.entries]
    biases = [zeros(one, f"{found[1]}.bias") for one in tensors
              if (found := _WEIGHT.fullmatch(one.key[1]))
              and (one.key[0], f"{found[1]}.bias") not in source.entries]
    for one in _WRITTEN.theirs(View(source, [*tensors, *biases]), _without_place):
        yield _with_padding(one) if one.key[1] == POSITIONS else one


def _without_place(one: Derived) -> Derived:
    raise CheckpointError(f"fairseq's transformer_lm has no counterpart for tensor {one.key[1]!r}; "
                          "choose another format")


def _with_padding(one: Derived) -> Derived:
    return joined([filled(one.key, (PADDING_ROWS, one.entry.shape[1]), one.entry.dtype), one], 0)


def more_tensors(tensors: Sequence[Derived], tied: bool, sinusoidal: bool) -> Iterator[Derived]:
    """Yield the tensors of a fairseq file that are not parameters. If the output matrix is tied, it
    is also yielded.

    Args:
        tensors: the tensors that `fairseq_tensors` yielded.
        tied: whether the output matrix is the same as the embedding matrix.
        sinusoidal: whether the model uses sinusoidal positions.
    """
    if tied:
        for tensor in tensors:
            if tensor.key == (MODEL, "decoder.embed_tokens.weight"):
                yield tensor.renamed("decoder.output_projection.weight")
    for name, value in _BUFFERS.items():
        if name == "decoder.version" or sinusoidal:
            yield filled((MODEL, name), (1,), torch.float32, value)


_EPS = 1e-5  # epsilon of fairseq's layer norms, which is not configurable


def model_arguments(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model settings in a fairseq file, or an empty dict if there are none."""
    model = (state.get("cfg") or {}).get("model", state.get("args"))
    values = vars(model) if isinstance(model, Namespace) else dict(model or {})
    return {name: plain_value(value) for name, value in values.items()}


def to_decoder(source: Source, arguments: Mapping[str, Any]) -> DecoderSettings:
    """Return the framework-independent settings of a `fairseq` source.

    Raises:
        CheckpointError: If settings are missing or have no framework-independent form.
    """
    for name in ("decoder_attention_heads", "activation_fn", "decoder_normalize_before"):
        if name not in arguments:
            raise CheckpointError(f"the checkpoint's settings do not contain {name}, so it is not "
                                  "a checkpoint of a decoder language model (transformer_lm)")
    learned = (MODEL, POSITIONS) in source.entries
    rows = arguments.get("max_target_positions")
    if learned:
        rows = source.entries[MODEL, POSITIONS].shape[0] - PADDING_ROWS
    plain = bool(arguments.get("no_token_positional_embeddings"))
    heads, width = int(arguments["decoder_attention_heads"]), _width(source)
    activation = ACTIVATIONS.get(str(arguments["activation_fn"]))
    if activation is None:
        raise CheckpointError(f"activation_fn={short(arguments['activation_fn'])} cannot be "
                              "converted to another framework; supported activations: "
                              f"{', '.join(ACTIVATIONS)}")
    return DecoderSettings(
        heads=heads, kv_heads=heads, norm="layernorm", norm_eps=_EPS, activation=activation,
        gated=False, positions="learned" if learned else "none" if plain else "sinusoidal",
        tied=bool(arguments.get("share_decoder_input_output_embed")),
        pre_norm=bool(arguments["decoder_normalize_before"]), max_positions=int(rows or 0),
        embed_scale=1.0 if arguments.get("no_scale_embedding") else math.sqrt(width))


def _width(source: Source) -> int:
    key = MODEL, "decoder.embed_tokens.weight"
    if key not in source.entries:
        raise CheckpointError("the checkpoint has no tensor 'decoder.embed_tokens.weight', so it "
                              "is not a checkpoint of a decoder language model (transformer_lm)")
    return source.entries[key].shape[1]


def from_decoder(source: Source, old: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the settings of an upcycled model to fairseq's settings.

    Args:
        source: framework-independent source of the upcycled model.
        old: fairseq's settings of the dense model.
    """
    paths = {spec.path: spec.dest for spec in setting_specs()}
    model = NeutralModel(source)
    tree = layer_settings(source, next(iter(source.layers)))
    ours = flatten({name: value for name, value in tree.items()
                    if name not in ("model_dim", "num_experts", "losses")})
    return {**old, "_name": "moe_transformer_lm", "moe_dispatch": "ragged",
            "moe_capacity_factor": "none",
            **{paths[path]: str(value) for path, value in ours.items() if path in paths},
            "moe_freq": model.moe[0] + 1, "moe_expert_count": model.experts,
            "moe_top1_expert": False}


logger = logging.getLogger(__name__)


def to_neutral(source: Source) -> Source:
    """Return a view of a dense `fairseq` source's model that uses framework-independent names."""
    if source.layers:
        raise CheckpointError(f"{next(iter(source.layers))!r} already has experts; use a dense "
                              "model")
    model = to_decoder(source, model_arguments(source.values[STATE]))
    weights = [source.tensor(key) for key in source.entries if key[0] == MODEL]
    if others := sorted({field for field, _ in source.entries} - {MODEL}):
        logger.info("left out %s, which is not used in a Mixture of Experts", ", ".join(others))
    values = {name: value for name, value in source.values.items()
              if name not in (COLUMNS, GROUPS, PARAMETERS, "settings")}
    return View(source, neutral_tensors(View(source, weights), model.tied), format=NEUTRAL,
                values={**values, "model": model.to_dict(), "step": source.values["step"] or 0})


def from_neutral(source: Source) -> Source:
    """Return a view of an upcycled model that uses the names of this package's fairseq models."""
    model = DecoderSettings.from_dict(source.values["model"])
    tensors = list(fairseq_tensors(source))
    tensors += more_tensors(tensors, model.tied, model.positions == "sinusoidal")
    return View(source, tensors, format="fairseq",
                layers={our_prefix(prefix): dict(layer) for prefix, layer in source.layers.items()},
                values={"step": source.values["step"], STATE: _state(source)})


def _state(source: Source) -> dict[str, Any]:
    """Return all entries of the checkpoint file that are not tensors. These entries are those of
    the dense model and the settings of the experts.
    """
    state = dict(source.values[STATE])
    state.pop(OPTIMIZER, None)
    arguments = from_decoder(source, model_arguments(state))
    if state.get("args"):
        state["args"] = Namespace(**{**vars(state["args"]), **arguments})
    else:
        state["cfg"] = {**state["cfg"], "model": arguments}
    experts = next(iter(source.layers.values()))["num_experts"]
    state[files.MANIFEST] = {
        "version": files.VERSION, "num_experts": experts, "world_size": 1, "rank": 0,
        "expert_parallel_size": 1, "num_updates": source.values["step"]}
    return state


STACKS = ("encoder", "decoder")
# copies of its parameters that an encoder layer of fairseq >= 0.12 stores next to the originals
_COPIES = re.compile(r"(encoder)\.layers\.(\d+)\.(in_proj|out_proj|fc1|fc2)_(weight|bias)")
_MLP = re.compile(r"(encoder|decoder)\.layers\.(\d+)\.fc([12])\.(weight|bias)")


def translates(source: Source) -> bool:
    """Return true if the source is a fairseq model whose encoder consists of transformer layers."""
    return source.format == "fairseq" and any(name.startswith("encoder.layers.")
                                              for _, name in source.entries)


def upcycle(source: Source, plan: Upcycling, check: Callable[[Namespace], None]) -> View:
    """Return a lazy view, in fairseq's format, of a translation model with experts as MLPs.

    Args:
        source: checkpoint of the dense model.
        plan: number of experts, and the layers that receive experts.
        check: the host's function, which raises `ValueError` if the new settings fit no model.
    Raises:
        CheckpointError: If the model already has MoE layers, if no layer would become an MoE layer,
            or if the settings do not support experts.
    """
    refuse_experts(source)
    every = {stack: plan.every if own is None else own for stack, own in zip(
        STACKS, (plan.encoder_every, plan.decoder_every), strict=True)}
    mlps = _mlps(source)
    chosen = {place: mlp for place, mlp in mlps.items()
              if every[place[0]] and (place[1] + 1) % every[place[0]] == 0}
    for stack, frequency in every.items():
        if (frequency or not any(every.values())) and not any(one == stack for one, _ in chosen):
            raise CheckpointError(f"no layer of the {stack} would become an MoE layer with "
                                  f"every={frequency}; use a smaller --every, or 0 for one of the "
                                  "two stacks")
    arguments = {**model_arguments(source.values[STATE]), **_flags(plan, every, chosen)}
    try:
        check(Namespace(**arguments))
    except ValueError as error:
            raise CheckpointError("the model cannot be converted to a model with experts: "
                                  f"{error}") from error
    tell_left_out(source)
    left = {name: value for name, value in source.values.items() if name not in (COLUMNS, GROUPS)}
    layers = {_prefix(place): {"num_experts": plan.experts} for place in chosen}
    return View(source, _tensors(source, plan, mlps, chosen), layers=layers, values={
        **left, PARAMETERS: [], STATE: _state_of(source.values, arguments, plan)})


def _mlps(source: Source) -> dict[tuple[str, int], dict[str, Derived]]:
    """Return the tensors of each MLP by stack, layer and framework-independent name."""
    mlps: dict[tuple[str, int], dict[str, Derived]] = {}
    for key in source.entries:
        if key[0] == MODEL and (name := _MLP.fullmatch(key[1])):
            part = f"{('w_in', 'w_out')[int(name[3]) - 1]}.{name[4]}"
            mlps.setdefault((name[1], int(name[2])), {})[part] = source.tensor(key)
    return mlps


def _prefix(place: tuple[str, int]) -> str:
    return f"{place[0]}.layers.{place[1]}.moe_layer.moe."


def _tensors(source: Source, plan: Upcycling, mlps: Mapping[tuple[str, int], Any],
             chosen: Mapping[tuple[str, int], Mapping[str, Derived]]) -> Iterator[Derived]:
    for key in source.entries:
        name = _MLP.fullmatch(key[1]) or _COPIES.fullmatch(key[1])
        if key[0] == MODEL and not (name and (name[1], int(name[2])) in chosen):
            yield source.tensor(key)
    for number, place in enumerate(mlps):
        if place in chosen:
            for tensor in moe_tensors(chosen[place], plan, number, ""):
                yield tensor.renamed(_prefix(place) + LAYER_NAMES[tensor.key[1]])


def _flags(plan: Upcycling, every: Mapping[str, int],
           chosen: Mapping[tuple[str, int], Mapping[str, Derived]]) -> dict[str, Any]:
    """Return the command-line flags with which fairseq can build the new model.

    Experts have the same inner width as the dense layers of their stack, unless `granularity`
    splits the MLPs or there is a shared expert.
    """
    settings: dict[str, Any] = {"router.top_k": plan.top_k, "router.normalize": "before_drop",
                                "router.normalize_min": 0.0}
    if plan.granularity > 1 or plan.shared:
        widths = {mlp["w_in.weight"].entry.shape[0] for mlp in chosen.values()}
        if len(widths) > 1:
            raise CheckpointError(
                f"the inner widths of encoder and decoder differ ({sorted(widths)}), but one flag "
                "sets both: use granularity=1 and shared=0, or --encoder-every 0")
        width = widths.pop()
        settings |= {"experts.hidden_dim": width // plan.granularity,
                     **({"experts.shared_hidden_dim": width,
                         "experts.shared_gate": plan.shared_gate} if plan.shared else {})}
    paths = {spec.path: spec.dest for spec in setting_specs()}
    return {"moe_freq": 0, **{f"{stack}_moe_freq": every[stack] for stack in STACKS},
            "moe_expert_count": plan.experts, "moe_top1_expert": False,
            "moe_second_expert_policy": "all", "moe_dispatch": "ragged",
            "moe_capacity_factor": "none",
            **{paths[path]: str(value) for path, value in settings.items()}}


def _state_of(values: Mapping[str, Any], arguments: Mapping[str, Any],
           plan: Upcycling) -> dict[str, Any]:
    """Return all entries of the checkpoint file that are not tensors."""
    old = values[STATE]
    state = {name: value for name, value in old.items() if name not in (OPTIMIZER, CRITERION)}
    if old.get("cfg") is not None:
        model = old["cfg"]["model"]
        state["cfg"] = {**old["cfg"], "model": Namespace(**arguments) if isinstance(
            model, Namespace) else dict(arguments)}
    else:
        state["args"] = Namespace(**{**vars(old["args"]), **arguments})
    state[files.MANIFEST] = {
        "version": files.VERSION, "num_experts": plan.experts, "world_size": 1, "rank": 0,
        "expert_parallel_size": 1, "num_updates": values["step"] or 0}
    return state
