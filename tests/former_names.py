"""Files as they were when experts' biases had other names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from moe_plugin.checkpoint.formats.plain import part_name, read_index, write_index
from moe_plugin.utils import checksums


def former(value: Any) -> Any:
    """State dicts, in whatever they are nested, with the former names."""
    if isinstance(value, dict):
        return {former(key): former(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [former(inner) for inner in value]
    if isinstance(value, str):
        return re.sub(r"\bbias_(in_LF|gate_LF|out_LD)\b", r"b_\1", value)
    return value


def rewrite(path: Path) -> None:
    """Give a file of `torch.save` the former names, and its checksum."""
    state = torch.load(path, weights_only=False)
    assert former(state).keys() == state.keys() or "bias_" in str(state.keys())
    checksums.write_sealed(path, lambda stream: torch.save(former(state), stream))


def rewrite_folder(folder: Path) -> None:
    """`rewrite` for a folder of `moe_plugin.checkpoint.save`."""
    index, _ = read_index(folder)
    for rank in range(index["parts"]):
        rewrite(folder / part_name(rank, index["parts"]))
    write_index(folder, index["parts"], index["extra"])
