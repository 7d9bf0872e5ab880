"""A checkpoint's experts as one safetensors file, which `experts.store_path` takes as it is."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from moe_plugin.checkpoint.formats.base import convert
from moe_plugin.checkpoint.formats.huggingface.files import write_safetensors
from moe_plugin.checkpoint.source import MODEL, CheckpointError, Source
from moe_plugin.checkpoint.torch_files import SealedWriter
from moe_plugin.experts.ffn import SHARD_AXIS
from moe_plugin.utils.regular_files import check_output, half_of, write_remedy


def write_experts(source: Source, path: str | os.PathLike[str],
                  advance: Callable[[int], None] = lambda _: None) -> None:
    """Write the experts of all layers, block by block; the file gets its name when it is complete.

    Args:
        source: of any format, see `formats.open_source`.
        path: of the file, ending in `.safetensors`.
        advance: called with bytes as they are written.
    Raises:
        CheckpointError: the checkpoint has no feed-forward experts, or the file cannot be written.
    """
    view, path = convert(source, "plain"), check_output(path)
    names = [name for field, name in view.entries if field == MODEL
             and name.rpartition(".")[2] in SHARD_AXIS and ".experts." in f".{name}"]
    if not names:
        raise CheckpointError(f"the {source.format} checkpoint has no feed-forward experts to "
                              f"write to {str(path)!r}; give that of a model with MoE layers")
    half = half_of(path)
    try:
        with SealedWriter(advance) as writer:
            write_safetensors(writer, half, view, names)
        os.replace(half, path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written ({error.strerror}); "
                              f"{write_remedy(error, Path(path).parent)}") from error
    finally:
        half.unlink(missing_ok=True)
