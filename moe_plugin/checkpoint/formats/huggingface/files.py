"""Reading and writing of safetensors folders.

A folder contains `config.json`, `model-00001-of-0000N.safetensors` and
`model.safetensors.index.json`. These files contain no code, and nothing is unpickled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from moe_plugin.checkpoint.formats.base import WriteProgress
from moe_plugin.checkpoint.formats.huggingface.families import moe_block_of
from moe_plugin.checkpoint.name_table import marked
from moe_plugin.checkpoint.source import (
    MODEL,
    CheckpointError,
    Derived,
    DerivedSource,
    Source,
    TensorEntry,
)
from moe_plugin.checkpoint.torch_files import SealedWriter, StoredTensor
from moe_plugin.experts.distributed_state import FLOAT32
from moe_plugin.memory.safetensors_file import DTYPES, SafetensorsFile, UnknownDtype
from moe_plugin.utils.checksums import METADATA, FirstRead
from moe_plugin.utils.messages import short
from moe_plugin.utils.regular_files import check_input, write_whole

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
MODELOPT = "hf_quant_config.json"  # file in which older ModelOpt describes a quantization
SHARD_BYTES = 5 << 30
_EXPERT = re.compile(r"(.+\.)(?:experts\.(?:(\d+)\.|(?:gate_up|up|down)_proj(?:_blocks)?$)|"
                     r"input_linear\.weight$)")
_LAYER = re.compile(r"(?:layers|blocks|h)\.(\d+)\.")
# settings that count layers, experts or other parts
_COUNT = re.compile(r"^(?:(num_(?:hidden_)?layers|n_layers?)|(.*experts)|.*(?:_size|heads|_dim))$")
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def open_safetensors(path: Path) -> DerivedSource:
    """Open a folder of safetensors files as a source. The tensors of the source have the same names
    as in the files.

    `values["config"]` contains the content of `config.json`.

    Raises:
        CheckpointError: If a file is missing or damaged.
    """
    config = read_json(path / CONFIG)
    if (path / MODELOPT).is_file():
        config.setdefault("quantization_config", {"quant_method": "modelopt"})
    weights = weight_map(path)
    found: dict[str, Any] = {}
    files = list(dict.fromkeys(weights.values()))
    for file in files:
        held = _tensors_in(path / file)
        found |= {name: Derived((MODEL, name), one.entry, one.read)
                  for name, one in held.items() if weights.get(name, file) == file}
        lost = [name for name, at in weights.items() if name and at == file and name not in held]
        if lost:
            raise CheckpointError(f"{str(path / file)!r} has no tensor {lost[0]!r}, although "
                                  f"{INDEX} lists it; download or copy the file again")
    layers: dict[str, dict[str, Any]] = _layers_of({name: one.entry for name, one in found.items()})
    block = moe_block_of(config)
    if block is not None:
        layers = {name: {**layer, FLOAT32: block.float32} for name, layer in layers.items()}
    return DerivedSource(marked(found.values(), layers), "hf", {"config": config}, layers,
                         {"model_type": config.get("model_type")}, [path / file for file in files])


def _tensors_in(path: Path) -> dict[str, StoredTensor]:
    try:
        check_input(path)
        check = FirstRead(path)
        with SafetensorsFile(path) as file:
            return {name: StoredTensor(path, held.offset, held.shape,
                                       torch.empty(held.shape, device="meta").stride(),
                                       held.dtype, check)
                    for name, held in sorted(file.held.items())}
    except (OSError, ValueError) as error:
        remedy = ("convert the model to one of them" if isinstance(error, UnknownDtype)
                  else "download or copy the file again")
        raise CheckpointError(f"checkpoint file {str(path)!r} cannot be read ({short(error)}); "
                              f"{remedy}") from error


def check_counts(source: Source) -> None:
    """Raise `CheckpointError` if `config.json` states more layers, experts or elements than the
    files can contain.

    Without this check, a model of arbitrary size could be built before the mismatch is detected.
    """
    config, names = source.values["config"], [name for _, name in source.entries]
    layers = 1 + max((int(found[1]) for found in map(_LAYER.search, names) if found), default=0)
    elements = sum(entry.numel for entry in source.entries.values())
    experts = max((layer["num_experts"] for layer in source.layers.values()), default=elements)
    inner = config.get("text_config")
    for name, value in {**config, **(inner if isinstance(inner, dict) else {})}.items():
        kind = _COUNT.search(name)
        most = 0 if kind is None else layers if kind[1] else experts if kind[2] else elements
        if most and isinstance(value, int) and value > most:
            raise CheckpointError(f"config.json has {name}={short(value)}, but the files allow at "
                                  f"most {most}: config.json belongs to a different model; "
                                  "download or copy the folder again")


def _layers_of(entries: Mapping[str, TensorEntry]) -> dict[str, dict[str, Any]]:
    """Find the MoE layers from the names of the experts' tensors. Each expert may be stored
    separately, or one tensor may contain all experts.
    """
    layers: dict[str, dict[str, Any]] = {}
    for name, entry in entries.items():
        if found := _EXPERT.match(name):
            count = int(found[2]) + 1 if found[2] else entry.shape[0] if entry.shape else 0
            layer = layers.setdefault(found[1], {"num_experts": 0})
            layer["num_experts"] = max(layer["num_experts"], count)
    return layers


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file. Raise `CheckpointError` if the file is missing or invalid."""
    try:
        check_input(path)
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{str(path)!r} cannot be read ({short(error)}); use the folder of a "
                              "Hugging Face model") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{str(path)!r} is not JSON ({short(error)}); download or copy the "
                              "file again") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{str(path)!r} contains a {type(values).__name__}, but an object "
                              "was expected; download or copy the file again")
    return values


def weight_map(path: Path) -> dict[str, str]:
    """Return the name of the file that contains each tensor, or `{"": file}` if a single file
    contains all tensors.

    Raises:
        CheckpointError: If there are no safetensors files, or if the index refers to a file outside
            the folder.
    """
    if not (path / INDEX).is_file():
        if (path / SINGLE).is_file():
            return {"": SINGLE}
        pickled = sorted(one.name for one in path.glob("pytorch_model*.bin"))
        why = (f"{pickled[0]} is a pickle, which can contain code and is not read: save the model "
               "with save_pretrained(..., safe_serialization=True)" if pickled
               else f"it contains neither {SINGLE} nor {INDEX}")
        raise CheckpointError(f"{str(path)!r} has no safetensors files; {why}")
    found = read_json(path / INDEX).get("weight_map")
    if not isinstance(found, dict) or not found or not all(
            isinstance(file, str) and Path(file).name == file and file.endswith(".safetensors")
            for file in found.values()):
        raise CheckpointError(f"{str(path / INDEX)!r} has no weight_map from tensors to "
                              ".safetensors files in its folder; download or copy the file again")
    return found


def shards_of(entries: Mapping[str, TensorEntry], most: int) -> dict[str, list[str]]:
    """Distribute tensors among files, and return the names of the tensors in each file.

    A tensor larger than `most` bytes is stored in a separate file.
    """
    groups: list[list[str]] = [[]]
    size = 0
    for name, entry in entries.items():
        if groups[-1] and size + entry.nbytes > most:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += entry.nbytes
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{at:05d}-of-{len(groups):05d}.safetensors": names
            for at, names in enumerate(groups, 1)}


def write_folder(path: Path, config: Mapping[str, Any], source: Source, most: int = SHARD_BYTES,
                 progress: WriteProgress = WriteProgress()) -> None:
    """Write the "model" tensors of a source, and `config.json`, to a folder. Only one block of a
    tensor is in memory at a time.

    Args:
        path: an existing folder.
        config: content of `config.json`.
        source: the source.
        most: maximum size of a file in bytes. A file may be larger only if it contains a single
            tensor.
        progress: object to which the writer reports its progress.
    """
    entries = {name: entry for (field, name), entry in source.entries.items() if field == MODEL}
    files = shards_of(entries, most)
    with SealedWriter(progress.advance) as writer:
        for file, names in files.items():
            if not progress.keeps(file):
                write_safetensors(writer, path / file, source, names,
                                  partial(progress.wrote, file))
    if len(files) > 1:
        total = sum(entry.nbytes for entry in entries.values())
        _write_json(path / INDEX, {
            "metadata": {"total_size": total},
            "weight_map": {name: file for file, names in files.items() for name in names}})
        progress.wrote(INDEX)
    _write_json(path / CONFIG, config)
    progress.wrote(CONFIG)


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    write_whole(path, json.dumps(values, indent=2) + "\n")


def write_safetensors(writer: SealedWriter, path: Path, source: Source, names: Iterable[str],
                      done: Callable[[], None] = lambda: None) -> None:
    """Start writing a safetensors file. (The writer of the `safetensors` library is not used,
    because it needs all tensors in memory at once.)

    A file consists of 8 bytes that contain the length of the JSON header, the header, and the
    values in the order of the header. Source: the format's description at
    github.com/huggingface/safetensors.

    Args:
        writer: the writer.
        path: path of the file.
        source: the source.
        names: names of the "model" tensors of the source to be written to this file.
        done: see `SealedWriter.write`.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **METADATA}}
    start, order = 0, []
    for name in names:
        entry = source.entries[MODEL, name]
        if entry.dtype not in _NAMES:
            raise CheckpointError(f"tensor {name!r} is {entry.dtype}, which safetensors does not "
                                  f"support; supported types: {', '.join(DTYPES)}")
        order.append((start, Derived((MODEL, name), entry, partial(source.read, (MODEL, name)))))
        header[name] = {"dtype": _NAMES[entry.dtype], "shape": list(entry.shape),
                        "data_offsets": [start, start + entry.nbytes]}
        start += entry.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    writer.fill(path, [(8 + len(text) + at, one) for at, one in order], done)
