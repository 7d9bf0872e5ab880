"""Functions that collect the statistics of every MoE layer of a model, and the settings that the
user has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moe_plugin.config.flags import CONFIG_FLAG
from moe_plugin.config.tree import flatten, from_dict, run_from_dict, to_dict
from moe_plugin.experts.matrices import of_transformers
from moe_plugin.layer import MoELayer
from moe_plugin.observe.history.words import comparable, written
from moe_plugin.output import LayerStats, MoEOutput
from moe_plugin.routing.counting import counts
from moe_plugin.routing.model_masks import TokenMasks, follow_masks
from moe_plugin.utils.selective import hidden_from_policies
from moe_plugin.utils.yaml_file import read_yaml

ON, OFF = "on", "off"  # the values of a flag that is a switch


def chosen(words: Iterable[str], known: Mapping[str, tuple[str, str]],
           several: Collection[str] = ()) -> dict[str, tuple[str, str]]:
    """Return the settings in a command and in its `--moe-config` file that differ from their
    defaults.

    Args:
        words: the command-line arguments.
        known: the settings of the host that differ from their defaults, as pairs (value, default)
            by flag. Boolean flags have the values `ON` and `OFF`.
        several: the names of flags that accept more than one value. See `written`.
    Returns: The changed settings, as pairs (value as written, default) by name.
    """
    found = written(words, several)
    named = {name: (known[name][0] if _is_switch(text, known[name]) else text or known[name][0],
                    known[name][1]) for name, text in found.items() if name in known}
    path = found.get(CONFIG_FLAG.flag.lstrip("-"))
    return named | (differing(flatten(read_yaml(path))) if path else {})


def _is_switch(text: str, known: tuple[str, str]) -> bool:
    return known == (ON, OFF) and text.lower() not in ("true", "false")


def differing(settings: Mapping[str, object]) -> dict[str, tuple[str, str]]:
    """Return the settings of this package that differ from their defaults. The keys are dotted
    paths, and the values are pairs (value, default).
    """
    defaults = {**flatten(to_dict(from_dict({}))), **flatten(to_dict(run_from_dict({})))}
    return {path: (str(value), shown(defaults[path])) for path, value in settings.items()
            if path in defaults and comparable(value) != comparable(defaults[path])}


def shown(value: object) -> str:
    """Format the default value of a setting for readers. None is shown as a dash."""
    return "–" if value is None else str(value)


Take = Callable[[str, LayerStats], None]


def listen_to(model: nn.Module, take: Take) -> dict[str, nn.Module]:
    """Call `take` with the layer's name and statistics in each training pass of each MoE layer.

    All layers of this package and the experts modules of `transformers` are supported. If a block
    contains only the MoE layer, the layer is given the name of the block. For experts modules of
    `transformers`, only the chosen experts are known. Therefore the entropy is NaN, and there are
    no losses. Padding tokens, according to the model's attention mask, are not counted. A
    recomputed pass is counted only once.

    Returns: The MoE layers by name.
    Raises:
        ValueError: If the model has no MoE layer.
    """
    found = dict(_layers(model))
    if not found:
        raise ValueError(f"{type(model).__name__} has no MoE layer whose statistics could be "
                         "recorded: it must contain a MoELayer or experts of transformers. Call "
                         "replace_ffn(model) or swap_moe_blocks(model) first")
    foreign = [module for module in found.values() if not isinstance(module, MoELayer)]
    masks = follow_masks(model, foreign) if foreign else TokenMasks()
    module: Any
    for name, module in found.items():
        if isinstance(module, MoELayer):
            module.register_forward_hook(partial(_of_layer, take, name))
        else:
            experts = module.down_proj.shape[0]  # of all ranks, because a DTensor has global sizes
            module.register_forward_hook(partial(_of_experts, take, name, experts, masks),
                                         with_kwargs=True)
    return found


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if isinstance(module, MoELayer):
            yield name.removesuffix(".moe") or type(module).__name__, module
        elif of_transformers(module):
            yield name.removesuffix(".experts"), module


@hidden_from_policies
def _of_layer(take: Take, name: str, layer: nn.Module, _: Any, out: MoEOutput) -> None:
    if out.stats is not None and counts(layer.training):
        take(name, out.stats)


@hidden_from_policies
def _of_experts(take: Take, name: str, experts: int, masks: TokenMasks, module: nn.Module,
                args: tuple[Any, ...], kwargs: dict[str, Any], _: Any) -> None:
    if counts(module.training):
        ids_TK = kwargs["top_k_index"] if "top_k_index" in kwargs else args[1]
        take(name, _stats(ids_TK, experts, masks.of(ids_TK)))


def _stats(ids_TK: Tensor, experts: int, real_T: Tensor | None = None) -> LayerStats:
    """Return the statistics of one forward call of a `transformers` experts module.

    ids_TK: the chosen experts, int [T, K]. Values outside of the range 0 to `E - 1` mean that no
    expert was chosen.
    real_T: bool [T], which is False for padding tokens. None if the batch contains no padding.
    """
    ids_KT = ids_TK.detach().t()
    here_KT = (ids_KT >= 0) & (ids_KT < experts)
    if real_T is not None:
        here_KT = here_KT & real_T
    load_KE = torch.zeros(len(ids_KT), experts, dtype=torch.long, device=ids_TK.device)
    load_KE.scatter_add_(1, ids_KT.clamp(0, experts - 1).long(), here_KT.long())
    unknown = torch.full((), torch.nan, device=ids_TK.device)
    tokens = (torch.full((), ids_TK.shape[0], device=ids_TK.device) if real_T is None
              else real_T.sum())
    return LayerStats(load_KE, load_KE, unknown, tokens, {})
