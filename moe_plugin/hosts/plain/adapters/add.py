"""`add_lora`: which experts of a model get adapters, and what is frozen."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, cast

import torch
from torch import nn

from moe_plugin.config.experts import ROUNDED
from moe_plugin.experts.ffn import FFNExperts
from moe_plugin.experts.lora import TARGETS, ExpertRanks
from moe_plugin.hosts.plain.adapters.files import save_adapter
from moe_plugin.layer import MoELayer, named_layers_in
from moe_plugin.utils.messages import short


def add_lora(model: nn.Module, rank: int = 8, alpha: float = 16.0, *,
             targets: Collection[str] = tuple(TARGETS),
             experts: Collection[int] | None = None,
             rank_pattern: Mapping[str, int] | None = None, use_rslora: bool = False,
             use_dora: bool = False, freeze: bool = True) -> list[str]:
    """Give experts low-rank adapters, which change nothing until they are trained.

    Expert l computes with w + (alpha / r) a b in the place of w: a is drawn as `peft` does, b is 0.
    Call it when the model has its weights, before it is wrapped (`ddp_model`, `fully_shard_model`)
    and before the optimizer is made; on all ranks.

    Args:
        rank: r.
        alpha: see above; with use_rslora the factor is alpha / sqrt(r).
        use_dora: the columns of the sum have lengths of their own, which train.
        targets: "gate_up" (the first maps; both share a, as in `peft`'s adapters of
            `gate_up_proj`), "down", or both.
        experts: global indices of those that get adapters; None: all. (Others keep rows of zeros.)
        rank_pattern: r by regular expressions that match the end of
            `NAME.experts.INDEX.TARGET`, NAME that of the layer; 0: no adapter. The first counts.
        freeze: everything else in the model; False: only these experts' own weights.
    Returns: names of the layers.
    Raises:
        ValueError: there is no layer, its experts cannot have adapters or have some, or no expert
            gets one.
    """
    _check(rank, targets, rank_pattern or {})
    layers = dict(_layers(model))
    if not layers:
        raise ValueError(f"{type(model).__name__} has no MoELayer, so that nothing gets adapters: "
                         "call swap_moe_blocks(model) or replace_ffn(model) first; in a model of "
                         "transformers whose experts stay, use peft's target_parameters")
    made = {name: ExpertRanks(_ranks(name, layer, rank, targets, experts, rank_pattern or {}),
                              dict.fromkeys(TARGETS.values(), alpha), use_rslora, use_dora)
            for name, layer in layers.items()}
    if not any(each.ranks for each in made.values()):
        raise ValueError(f"experts={short(experts)} with rank_pattern={short(rank_pattern)} leaves "
                         "no expert with an adapter: must be global indices from 0, and patterns "
                         "that match NAME.experts.INDEX.TARGET; give others")
    for parameter in model.parameters() if freeze else ():
        _freeze(parameter)
    for name, layer in layers.items():
        if made[name].ranks:
            _add(layer, made[name])
    if hasattr(model, "peft_config"):
        cast(Any, model).save_pretrained = _SavesExperts(model)
    return [name for name in layers if made[name].ranks]


def _add(layer: MoELayer, ranks: ExpertRanks) -> None:
    for parameter in layer.experts.parameters():
        _freeze(parameter)
    seed = torch.randint(2**31, (1,), device="cpu")
    if layer.comm.size > 1:
        seed = layer.comm.broadcast(seed.to(layer.comm.device))
    built = layer.experts
    assert isinstance(built, FFNExperts)
    built.add_lora(ranks, int(seed))
    layer.follow_parameters()


class _SavesExperts:
    """`save_pretrained` of a model of `peft`, which knows its own adapters alone."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, save_directory: str, *args: Any, **kwargs: Any) -> None:
        """All adapters, see `save_adapter`. Collective."""
        save_adapter(self.model, save_directory)


def _freeze(parameter: nn.Parameter) -> None:
    parameter.requires_grad_(False)
    parameter.grad = None


def _check(rank: int, targets: Collection[str], pattern: Mapping[str, int]) -> None:
    if rank < 1:
        raise ValueError(f"rank={rank} must be >= 1; use rank_pattern={{...: 0}} for experts "
                         "without an adapter")
    if (least := min(pattern.values(), default=0)) < 0:
        raise ValueError(f"rank_pattern={short(dict(pattern))}: {least} must be >= 0; use 0 for "
                         "experts without an adapter")
    if isinstance(targets, str) or not set(targets) <= set(TARGETS) or not targets:
        raise ValueError(f"targets={short(targets)} must be a list of {', '.join(TARGETS)}; for "
                         "routers use peft's target_parameters")


def _layers(model: nn.Module) -> Iterator[tuple[str, MoELayer]]:
    """Names and layers of a model; `ValueError` for experts that cannot have adapters."""
    for name, layer in named_layers_in(model).items():
        built, where = layer.experts, f"layer {name!r}"
        if not isinstance(built, FFNExperts):
            raise ValueError(f"{where} has {type(built).__name__} as experts: must be experts of "
                             "kind ffn or gated_ffn on the device (experts.store=device), without "
                             "another adapter in their place; use peft for others")
        if layer.config.experts.precision in ROUNDED:
            raise ValueError(f"{where} has experts.precision={layer.config.experts.precision}, "
                             "whose kernels take no adapters: must be ieee or tf32; set it so")
        if built.w_in_LDF.is_meta:
            raise ValueError(f"{where} is on the meta device: must have its weights; call add_lora "
                             "after they are loaded")
        yield name, layer


def _ranks(name: str, layer: MoELayer, rank: int, targets: Collection[str],
           experts: Collection[int] | None, pattern: Mapping[str, int]) -> dict[str, list[int]]:
    """r of every expert by target, without targets of which no expert has any."""
    built, count = layer.experts, layer.config.num_experts
    assert isinstance(built, FFNExperts)
    if built.adapters is not None:
        raise ValueError(f"layer {name!r} has adapters already: must be added once; call "
                         "merge_lora(model) before")
    if unknown := [e for e in experts or () if not 0 <= e < count]:
        raise ValueError(f"experts={short(experts)}: {unknown[0]} must be in 0..{count - 1}, the "
                         f"experts of layer {name!r}; leave it out")

    def of(expert: int, target: str) -> int:
        full = f"{name}.experts.{expert}.{target}"
        chosen = experts is None or expert in experts
        return next((r for key, r in pattern.items() if re.match(rf"(.*\.)?({key})$", full)),
                    rank if chosen else 0)

    found = {target: [of(expert, target) for expert in range(count)] for target in targets}
    return {TARGETS[target]: ranks for target, ranks in found.items() if any(ranks)}
