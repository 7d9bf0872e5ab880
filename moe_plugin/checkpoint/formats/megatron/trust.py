"""Which classes a distributed checkpoint may name. torch and Megatron read `.metadata` and byte
entries without a limit, so all pickles of a checkpoint are checked before they get it.
"""

from __future__ import annotations

import io
import os
from typing import Any

from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from moe_plugin.checkpoint import trust

_METADATA, _PLANNER = ("torch.distributed.checkpoint.metadata.",
                       "torch.distributed.checkpoint.planner.")
ALLOWED = {
    *(_METADATA + name
      for name in ("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex",
                   "StorageMeta", "TensorProperties", "TensorStorageMetadata",
                   "_MEM_FORMAT_ENCODING")),
    *(_PLANNER + name
      for name in ("BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem",
                   "WriteItemType")),
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.distributed.checkpoint.filesystem._StoragePrefix",
    "torch.serialization._get_layout", "torch.Size", "collections.OrderedDict",
    # dataclasses with what torch's own hold and more, which 0.15 writes
    *("megatron.core.dist_checkpointing.strategies.torch." + name
      for name in ("MCoreMetadata", "MCoreSavePlan")),
}


def check(folder: str) -> None:
    """`UntrustedFile` where a pickle of the checkpoint names other classes than the listed ones and
    Megatron's own (`megatron.core.safe_globals`).
    """
    common, index = (os.path.join(folder, name) for name in ("common.pt", ".metadata"))
    if os.path.exists(common):
        trust.check(common, common)
    if not os.path.exists(index):
        return
    with open(index, "rb") as stream:
        metadata = trust.Unpickler(stream, ALLOWED, index).load()
    for key, place in metadata.storage_data.items():
        if isinstance(metadata.state_dict_metadata.get(key.fqn), BytesStorageMetadata):
            _check_entry(folder, key.fqn, place)


def _check_entry(folder: str, name: str, place: Any) -> None:
    path = os.path.join(folder, place.relative_path)
    with open(path, "rb") as stream:
        stream.seek(place.offset)
        content = stream.read(place.length)
    trust.check(io.BytesIO(content), f"entry {name!r} of {path}")
