"""Format "hf": a folder with safetensors files that Hugging Face's `transformers` can load."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from moe_plugin.checkpoint.derived import in_memory
from moe_plugin.checkpoint.formats.base import (
    CheckpointSizes,
    Format,
    WriteProgress,
    formats,
)
from moe_plugin.checkpoint.formats.huggingface.families import family_of
from moe_plugin.checkpoint.formats.huggingface.files import (
    CONFIG,
    INDEX,
    SINGLE,
    open_safetensors,
    write_folder,
)
from moe_plugin.checkpoint.formats.huggingface.names import family_tensors, neutral_tensors
from moe_plugin.checkpoint.formats.huggingface.quantization import check_plain, dequantized
from moe_plugin.checkpoint.formats.huggingface.settings import (
    AROUND,
    config_of,
    decoder_settings,
    family_for,
)
from moe_plugin.checkpoint.name_table import marked
from moe_plugin.checkpoint.neutral import NEUTRAL, NeutralModel
from moe_plugin.checkpoint.source import MODEL, CheckpointError, DerivedSource, Source, View


def to_neutral(source: Source) -> View:
    """Return a view of a Hugging Face source that uses framework-independent names. The source must
    contain `config.json` as `values["config"]`.

    Raises:
        CheckpointError: If a tensor or a setting of the model has no framework-independent name.
    """
    source = dequantized(source)
    config = source.values["config"]
    settings = decoder_settings(config)
    view = View(source, neutral_tensors(source, family_of(config), settings.tied), format=NEUTRAL,
                values={**source.values, "model": settings.to_dict()})
    view.layers = {
        name.removesuffix("experts.w_in_LDF"): {"num_experts": entry.shape[0]}
        for (_, name), entry in view.entries.items() if name.endswith("moe.experts.w_in_LDF")}
    return view


def _whole_to_neutral(source: Source) -> View:
    family = family_of(source.values["config"])
    if family.decoder is None:
        raise CheckpointError(
            f"model_type={family.model_type!r} has no framework-independent form ({family.alone}), "
            "so only its MoE blocks can be converted; load it with transformers, and insert "
            "MoELayers with moe_plugin.hosts.plain.huggingface.swap_moe_blocks")
    return to_neutral(source)


def from_neutral(source: Source) -> View:
    """Return a view of a framework-independent source with the tensor names of a Hugging Face
    family that supports the model.
    """
    # a model with our layers in its MoE blocks
    if AROUND in source.values["model"].get("extra", {}):
        family = family_of(source.values["config"])
        return View(source, family_tensors(source, family), format="hf", layers={})
    model, original = NeutralModel(source), source.values.get("config", {})
    family = family_for(model, original.get("model_type"))
    return View(source, family_tensors(source, family), format="hf", layers={}, values={
        **source.values, "config": config_of(family, model, original)})


@formats.register("hf")
class HuggingFaceFormat(Format):
    """Folders with `config.json` and safetensors files that `from_pretrained` can load."""

    name = "hf"
    views_as, views_of = {NEUTRAL: _whole_to_neutral}, {NEUTRAL: from_neutral}

    def detect(self, path: Path, trust: bool = False) -> bool:
        """Return true if the path is a folder that contains `config.json` and safetensors files."""
        return (path / CONFIG).is_file() and (
            (path / INDEX).is_file() or (path / SINGLE).is_file())

    def open(self, path: Path, trust: bool = False) -> Source:
        """See `Format.open`. Files are never unpickled in this format."""
        return dequantized(open_safetensors(path))

    def write(self, source: Source, path: Path, layout: CheckpointSizes,
              progress: WriteProgress = WriteProgress()) -> None:
        """See `Format.write`. The format does not support optimizer state."""
        self.check(layout)
        if others := sorted({field for field, _ in source.entries if field != MODEL}):
            raise CheckpointError("format 'hf' does not support optimizer state, but the "
                                  f"checkpoint has {', '.join(others)}; convert only the model "
                                  "(--model-only)")
        check_plain(source)
        dtype = max((entry.dtype for entry in source.entries.values()), key=lambda dtype: sum(
            entry.nbytes for entry in source.entries.values() if entry.dtype == dtype))
        config = {**source.values["config"], "torch_dtype": str(dtype).removeprefix("torch.")}
        config.pop("dtype", None)  # torch_dtype is the same setting under its older name
        write_folder(path, config, source, progress=progress)

def state_source(state: Mapping[str, Any], config: Mapping[str, Any]) -> DerivedSource:
    """Return a source of format "hf" for a state dict in memory.

    Args:
        state: state dict with Hugging Face's names as keys.
        config: content of `config.json`.
    """
    tensors = (in_memory((MODEL, name), value) for name, value in state.items()
               if isinstance(value, torch.Tensor))
    return DerivedSource(marked(tensors, {}), "hf", {"config": dict(config)}, {})
