"""A reader of safetensors files that reads from the file instead of mapping it into memory.

If another process truncates the file, reading raises an error. With memory mapping, the process
would be killed by SIGBUS. If a file is read, not mapped, its pages do not count toward memory
limits.

A safetensors file consists of 8 bytes that contain the length of a JSON header, followed by the
header and the tensors' data. Source: the description of the format at
github.com/huggingface/safetensors.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from typing import Any, BinaryIO

import torch
from torch import Tensor

from moe_plugin.memory.tiers import TierTensor, read_values
from moe_plugin.utils import checksums
from moe_plugin.utils.messages import short

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}


class UnknownDtype(ValueError):
    """Error that is raised if a complete file contains a tensor of an unsupported dtype."""


class SafetensorsFile:
    """A safetensors file that has been opened for reading. Use this class in a `with` statement, or
    call `close` when the file is no longer needed.

    Args:
        path: path of the file.
        verify: whether to verify the file's checksum. The checksum is verified only if the file has
            one and this process has not verified it before.

    Attributes:
        name: name of the file, for use in messages.
        held: mapping from the name of each tensor to its location, shape and dtype in the file.
        metadata: the metadata contained in the header.
    Raises:
        OSError: If the file cannot be opened.
        UnknownDtype: If a tensor has an unsupported dtype.
        ValueError: If the file is damaged or incomplete.
    """

    def __init__(self, path: str | os.PathLike[str], verify: bool = False) -> None:
        self.name = str(path)
        self.file: BinaryIO = open(path, "rb")  # noqa: SIM115 - closed by `close`
        try:
            header, start = _header(self.file)
            self.metadata: Mapping[str, str] = header.pop("__metadata__", None) or {}
            self.held = {name: self._held(name, entry, start) for name, entry in header.items()}
            if verify:  # only once, although each layer opens the file that contains all experts
                # inode and modification time are part of the cache key, so a changed file is
                # verified again
                about = os.fstat(self.file.fileno())
                _verify_once(os.path.realpath(path), about.st_ino, about.st_mtime_ns)
        except BaseException:
            self.file.close()
            raise

    def _held(self, name: str, entry: Any, start: int) -> TierTensor:
        if entry["dtype"] not in DTYPES:
            raise UnknownDtype(f"{short(name)} has dtype {short(entry['dtype'])}, which is not "
                               f"supported; supported dtypes: {', '.join(DTYPES)}")
        begin, end = entry["data_offsets"]
        held = TierTensor(tuple(entry["shape"]), DTYPES[entry["dtype"]], file=self.file.fileno(),
                    offset=start + begin)
        if held.nbytes != end - begin:
            raise ValueError(f"{short(name)} has {end - begin} bytes, which does not match its "
                             f"shape {short(list(held.shape))}")
        return held

    def read(self, name: str) -> Tensor:
        """Read a tensor from the file into memory.

        Raises:
            TierError: If the file was truncated after it was opened, or cannot be read.
        """
        held = self.held[name]
        made = torch.empty(held.shape, dtype=held.dtype)
        read_values(held, made, self.name)
        return made

    def close(self) -> None:
        self.file.close()

    def __enter__(self) -> SafetensorsFile:  # noqa: PYI034 - Self needs Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@functools.lru_cache(maxsize=256)
def _verify_once(path: str, *changed: int) -> None:
    checksums.verify(path)


def _header(file: BinaryIO) -> tuple[dict[str, Any], int]:
    """Return the entries of the header, and the byte offset of the tensors' data."""
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    try:
        if not 2 <= length <= size - 8:
            raise ValueError("its header is incomplete")
        header = json.loads(file.read(length))
        for name, entry in header.items():
            if name != "__metadata__":
                _check_entry(name, entry)
        places = sorted(entry["data_offsets"] for name, entry in header.items()
                        if name != "__metadata__")
        if places and places[-1][1] > size - 8 - length:
            raise ValueError("it ends before its last tensor does")
        # the library demands this, too: a small file with overlapping tensors could expand and fill
        # memory or a disk
        ends = [0, *(end for _, end in places)]
        if [begin for begin, _ in places] != ends[:-1] or ends[-1] != size - 8 - length:
            raise ValueError("its tensors overlap, or some of its bytes belong to no tensor")
    except (LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"its header does not describe tensors ({short(error)})") from error
    return header, 8 + length


def _check_entry(name: str, entry: Mapping[str, Any]) -> None:
    begin, end = entry["data_offsets"]
    numbers = [begin, end, *entry["shape"]]
    if not all(type(number) is int and number >= 0 for number in numbers) or begin > end:
        raise ValueError(f"{short(name)} has sizes {short(numbers)}, which must be integers >= 0 "
                         "in ascending order of offsets")
