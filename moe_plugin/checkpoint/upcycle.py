"""Upcycling: conversion of a dense model to a Mixture of Experts that initially computes the same
function.

Copies: every expert is a copy of the layer's MLP, and the routers are initialized randomly. The
weights of the chosen experts sum to 1. The layer therefore has the same output as the MLP,
regardless of which experts are chosen. Source: Komatsuzaki and others 2023, Sparse Upcycling.

Granular experts: the MLP is split into `G` slices along the inner width. For each slice, the layer
has `E / G` experts that are copies of this slice. Expert `c * G + g` is slice `g` of copy `c`. The
layer has the same output as the MLP only if all slices are chosen equally often and with equal
weights. The router is therefore initialized with one random row per copy. This row is repeated for
all `G` experts of the copy (a virtual group). Because the `G` experts of a copy have equal scores,
the router always chooses whole groups if `top_k` is a multiple of `G`. The weights of the experts
for each slice sum to `1 / G`. To compensate, the output of the layer is multiplied by `G`. Source:
He and others 2024, Upcycling Large Language Models into Mixture of Experts, section "virtual group
initialization". This implementation multiplies only the output matrices by `G`, which is exact for
every activation function.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from moe_plugin.checkpoint.derived import filled, pieces_of, stacked, transposed
from moe_plugin.checkpoint.formats.base import CheckpointSizes, Format
from moe_plugin.checkpoint.neutral import DecoderSettings
from moe_plugin.checkpoint.source import (
    MODEL,
    CheckpointError,
    Derived,
    Source,
    TensorEntry,
    View,
    Window,
)
from moe_plugin.utils.messages import short
from moe_plugin.utils.regular_files import write_remedy

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Upcycling:
    """Settings for converting a dense model to a Mixture of Experts.

    Attributes:
        experts: number of experts per MoE layer (E).
        top_k: number of experts per token.
        granularity: number of slices into which each MLP is split (G), or 1 if experts are copies
            of the whole MLP.
        shared: fraction (0 <= x < 1) of the MLP's output that the shared expert contributes. The
            shared expert is a copy of the MLP, and the routed experts contribute the rest of the
            output.
        shared_gate: whether the shared expert has the gate that Qwen2-MoE uses.
        every: number of layers from one MoE layer to the next. The last layer of every group of
            `every` layers is converted to an MoE layer. If `every` is 1, all layers are converted.
        encoder_every, decoder_every: like `every`, but for the encoder and the decoder of a
            translation model. If the value is 0, no layer of the encoder or decoder is converted.
            Defaults to `every`.
        router_std: standard deviation of the random rows of the routers.
        seed: random seed for the rows of the routers.
    """

    experts: int
    top_k: int
    granularity: int = 1
    shared: float = 0.0
    shared_gate: bool = False
    every: int = 1
    encoder_every: int | None = None
    decoder_every: int | None = None
    router_std: float = 0.02
    seed: int = 0

    def __post_init__(self) -> None:
        g = self.granularity
        for name, fits, must, remedy in (
                ("granularity", g >= 1, "at least 1", "use 1 for copies"),
                ("experts", self.experts >= 2 and self.experts % max(g, 1) == 0,
                 f"at least 2 and a multiple of granularity={g}", f"use {8 * max(g, 1)}"),
                ("top_k", 2 <= self.top_k <= self.experts and self.top_k % max(g, 1) == 0,
                 f"from 2 to experts={self.experts} and a multiple of granularity={g}, so that "
                 "the weights sum to 1 and groups are complete", f"use {max(2, g)}"),
                ("shared", 0 <= self.shared < 1, "from 0 to below 1", "use 0 for none"),
                ("shared_gate", not self.shared_gate or self.shared > 0,
                 "false without a shared expert", "set shared, e.g. 0.5"),
                ("every", self.every >= 1, "at least 1", "use 1 for all layers"),
                *((name, (getattr(self, name) or 0) >= 0, "at least 0", "use 0 for no layer")
                  for name in ("encoder_every", "decoder_every")),
                ("router_std", self.router_std > 0, "above 0", "use 0.02")):
            if not fits:
                value = getattr(self, name)  # a field of this dataclass
                raise ValueError(f"upcycling {name}={value}: must be {must}; {remedy}")


def upcycle(source: Source, plan: Upcycling) -> View:
    """Return a lazy view that converts a framework-independent dense model to a Mixture of Experts.

    The new model cannot use the optimizer state of the dense model. The optimizer state is
    therefore left out, and a message is logged.

    Raises:
        CheckpointError: If the model already has MoE layers, or if no layer has an MLP that can be
            converted to experts.
    """
    settings = DecoderSettings.from_dict(source.values["model"])
    refuse_experts(source, settings.top_k)
    if (plan.encoder_every, plan.decoder_every) != (None, None):
        raise CheckpointError("the model has no encoder, but encoder_every and decoder_every apply "
                              "only to fairseq's translation models; set every instead")
    mlps = _mlps(source)
    last = max(mlps, default=-1)
    chosen = {layer for layer in mlps if (layer + 1) % plan.every == 0}
    if not chosen:
        raise CheckpointError(f"no layer would become an MoE layer with every={plan.every}, "
                              f"because the model has MLPs only in layers up to {last}; use a "
                              "smaller --every")
    tell_left_out(source)
    values = {**source.values, "model": replace(
        settings, top_k=plan.top_k, router="softmax", normalize_top_k=True,
        router_scale=1.0).to_dict()}
    layers = {f"layers.{layer}.moe.": {"num_experts": plan.experts} for layer in sorted(chosen)}
    return View(source, _tensors(source, plan, mlps, chosen), values=values, layers=layers)


def refuse_experts(source: Source, top_k: int = 0) -> None:
    """Raise `CheckpointError` for a model that already has MoE layers."""
    if source.layers or top_k:
        raise CheckpointError(f"{next(iter(source.layers), 'the model')!r} already has experts; "
                              "use a dense model")


def tell_left_out(source: Source) -> None:
    """Log which data of the old checkpoint is missing in the new checkpoint."""
    if left_out := sorted({field for field, _ in source.entries if field != MODEL}):
        logger.info("left out the optimizer state %s, which starts from zero in the new model",
                    ", ".join(left_out))


def _mlps(source: Source) -> dict[int, dict[str, Derived]]:
    """Return the tensors of each layer's MLP, keyed by layer index and name within the MLP."""
    mlps: dict[int, dict[str, Derived]] = {}
    for key in source.entries:
        parts = key[1].split(".")
        if key[0] == MODEL and parts[0] == "layers" and parts[2] == "mlp":
            mlps.setdefault(int(parts[1]), {})[".".join(parts[3:])] = source.tensor(key)
    return mlps


def _tensors(source: Source, plan: Upcycling, mlps: Mapping[int, Mapping[str, Derived]],
             chosen: set[int]) -> Iterator[Derived]:
    for key in source.entries:
        if key[0] != MODEL:
            continue
        parts = key[1].split(".")
        if parts[0] == "layers" and parts[2] == "mlp" and int(parts[1]) in chosen:
            continue
        yield source.tensor(key)
    for layer in sorted(chosen):
        yield from moe_tensors(mlps[layer], plan, layer, f"layers.{layer}.moe.")


def moe_tensors(mlp: Mapping[str, Derived], plan: Upcycling, layer: int,
                prefix: str) -> Iterator[Derived]:
    """Yield the tensors of an MoE layer that replaces an MLP, under framework-independent names.

    Args:
        mlp: tensors of the MLP, by their framework-independent names within the MLP.
        plan: settings of the conversion.
        layer: index of the MoE layer, which must be unique because it is part of the router's
            random seed.
        prefix: prefix for the names of the new tensors.
    Raises:
        CheckpointError: If the MLP cannot be split into `plan.granularity` slices.
    """
    inner = mlp["w_in.weight"].entry.shape[0]
    if inner % plan.granularity:
        raise CheckpointError(f"the MLP at {prefix} has inner width {inner}, which is not a "
                              f"multiple of granularity={plan.granularity}; choose a divisor")
    yield _router(mlp["w_in.weight"], plan, layer).renamed(prefix + "router.weight")
    for part in ("w_in", "w_gate", "w_out"):
        if part + ".weight" in mlp:
            yield from _experts(mlp, part, plan, prefix)
            if plan.shared:
                yield from _shared(mlp, part, plan, prefix)
    if plan.shared_gate:
        like = mlp["w_in.weight"].entry
        yield filled((MODEL, prefix + "shared.gate.weight"), (1, like.shape[1]), like.dtype)


def _experts(mlp: Mapping[str, Derived], part: str, plan: Upcycling,
             prefix: str) -> Iterator[Derived]:
    g, out, copies = plan.granularity, part == "w_out", plan.experts // plan.granularity
    whole = transposed(mlp[part + ".weight"], (1, 0))  # [D, F], but [F, D] for w_out
    axis = 0 if out else 1
    factor = (1 - plan.shared) * g if out else 1.0
    pieces = [_scaled(piece, factor) for piece in pieces_of(whole, g, axis)] * copies
    yield stacked(pieces).renamed(f"{prefix}experts.{part}_{'LFD' if out else 'LDF'}")
    if part + ".bias" in mlp:
        bias = mlp[part + ".bias"]
        # gate weights sum to 1, so each piece adds the whole output bias
        parts = [_scaled(bias, 1 - plan.shared)] * g if out else pieces_of(bias, g)
        name = f"bias{part[1:]}_{'LD' if out else 'LF'}"
        yield stacked([*parts] * copies).renamed(f"{prefix}experts.{name}")


def _shared(mlp: Mapping[str, Derived], part: str, plan: Upcycling,
            prefix: str) -> Iterator[Derived]:
    # the gate starts at sigmoid(0) = 1/2
    factor = 1.0 if part != "w_out" else plan.shared * (2 if plan.shared_gate else 1)
    for kind in ("weight", "bias"):
        if f"{part}.{kind}" in mlp:
            yield _scaled(mlp[f"{part}.{kind}"], factor).renamed(f"{prefix}shared.{part}.{kind}")


def _scaled(one: Derived, factor: float) -> Derived:
    if factor == 1.0:
        return one
    return replace(one, read=lambda window: (one.read(window).float() * factor).to(
        one.entry.dtype) if one.entry.dtype != torch.float64 else one.read(window) * factor)


def _router(like: Derived, plan: Upcycling, layer: int) -> Derived:
    """Return router weights with one random row per copy, repeated for all experts of the copy."""
    entry = TensorEntry((plan.experts, like.entry.shape[1]), like.entry.dtype)

    def read(window: Window) -> Tensor:
        generator = torch.Generator().manual_seed(plan.seed * 1_000_003 + layer)
        rows = torch.empty(plan.experts // plan.granularity, entry.shape[1])
        rows.normal_(0.0, plan.router_std, generator=generator)
        return rows.repeat_interleave(plan.granularity, 0)[window].to(entry.dtype)

    return Derived(like.key, entry, read)


def write_new(source: Source, to: Format, target: Path) -> None:
    """Write a source as a new checkpoint. The source must use the names of the target format. If
    writing fails, incomplete files are removed.

    Raises:
        CheckpointError: If the target already exists, if the format cannot store the source, or if
            the disk is full.
    """
    if target.exists():
        raise CheckpointError(f"{str(target)!r} already exists; choose another folder")
    scratch = target.with_name(target.name + ".writing")
    try:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        to.write(source, scratch, CheckpointSizes())
        os.rename(scratch, target)
    except OSError as error:
        shutil.rmtree(scratch, ignore_errors=True)
        raise CheckpointError(f"{str(target)!r} cannot be written ({short(error)}); "
                              f"{write_remedy(error, target.parent)}") from error
    except Exception:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
