"""Storage of one layer's experts in a file. The file is either an existing safetensors file or an
unnamed file created by this module.
"""

from __future__ import annotations

import errno
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_plugin.comm.placement import Placement
from moe_plugin.experts.base import use_current_names
from moe_plugin.memory.safetensors_file import SafetensorsFile
from moe_plugin.memory.tiers import TierError, TierTensor, write_values
from moe_plugin.utils.messages import short
from moe_plugin.utils.regular_files import make_folder, write_remedy

Shapes = Mapping[str, tuple[int, ...]]  # by parameter: shape of one expert's (or shard's) part
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class ExpertFile:
    """The parameters of a layer's experts, stored in an open file.

    Attributes:
        name: name of the file, for use in messages.
        dtype: dtype of the stored parameters.
        writable: True if the file was created by `own_file`, so that it may be changed.
        shapes: mapping from the name of a parameter to its shape for a single expert.
        local: number of experts on this rank, L.
    """

    def __init__(self, file: Any, name: str, dtype: torch.dtype, shapes: Shapes, local: int,
                 offsets: Mapping[str, int], writable: bool) -> None:
        self._file, self.name, self.dtype, self.writable = file, name, dtype, writable
        self.shapes, self.local, self._offsets = shapes, local, offsets

    def held(self, expert: int) -> dict[str, TierTensor]:
        """Return the location of one expert's parameters in the file. See `tiers.read_values`."""
        return {name: TierTensor(shape, self.dtype, file=self._file.fileno(),
                           offset=self._offset(name, expert))
                for name, shape in self.shapes.items()}

    def write(self, expert: int, name: str, x: Tensor) -> None:
        """Convert one expert's slice of a parameter to the file's dtype, and write it to the file.

        Raises:
            TierError: If the disk is full. Experts that were written earlier are not affected.
        """
        try:
            write_values(self._file.fileno(), self._offset(name, expert), x.to(self.dtype))
        except OSError as error:
            raise TierError(
                error.errno, f"experts do not fit into {self.name} ({error.strerror}); "
                             f"{write_remedy(error, self.name)}; experts.store_path selects the "
                             "folder"
            ) from error

    def mapped(self) -> dict[str, Tensor]:
        """Map a file created by `own_file` into memory, and return a tensor [L, ...] per parameter.

        Pages are read from the file on first use. Writing to the tensors changes the file. If
        another process truncated a mapped file, the operating system would kill a process that
        accesses a page beyond the new end. Other processes cannot truncate an unnamed file, because
        they cannot open it.

        Raises:
            TierError: If the file is shorter than the data written to it.
        """
        size, ends = os.fstat(self._file.fileno()).st_size, self._offset
        wanted = max((ends(name, self.local) for name in self.shapes), default=0)
        if size < wanted:
            raise TierError(errno.EIO, f"the file of experts in {self.name} has {size} bytes "
                                       f"instead of {wanted}: it was truncated; load a checkpoint "
                                       "again")
        # the file has no name, so it is opened again through /proc
        storage = torch.UntypedStorage.from_file(
            f"/proc/self/fd/{self._file.fileno()}", True, size)
        empty: Any = torch.empty(0, dtype=self.dtype)  # the stubs of `set_` lack such storages
        return {name: empty.new_empty(0).set_(
            storage, self._offsets[name] // self.dtype.itemsize,
            torch.Size((self.local, *shape))) for name, shape in self.shapes.items()}

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertFile:
        if not self.writable:
            return self
        # copies of a layer must not share a file that they write
        made = own_file(self.name, self.dtype, self.shapes, self.local)
        left = os.fstat(self._file.fileno()).st_size
        os.lseek(self._file.fileno(), 0, os.SEEK_SET)
        while left:
            left -= os.copy_file_range(self._file.fileno(), made._file.fileno(), left)
        return made

    def _offset(self, name: str, expert: int) -> int:
        expert_bytes = torch.Size(self.shapes[name]).numel() * self.dtype.itemsize
        return self._offsets[name] + expert * expert_bytes


def own_file(folder: str | os.PathLike[str], dtype: torch.dtype, shapes: Shapes,
             local: int) -> ExpertFile:
    """Create an unnamed file that has space for `local` experts. The operating system deletes the
    file when the process exits.

    Raises:
        ValueError: If the folder cannot be created or is not writable.
    """
    folder, offsets, end = make_folder(Path(folder)), {}, 0
    for name, shape in shapes.items():
        offsets[name], end = end, end + local * torch.Size(shape).numel() * dtype.itemsize
        # a multiple of every item size, which `mapped` needs
        end += -end % 64
    try:
        file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - lives as long as the layer
        os.ftruncate(file.fileno(), end)  # the disk allocates no space before data is written
    except OSError as error:
        raise ValueError(f"experts.store_path={short(str(folder))} cannot be written "
                         f"({error.strerror}); {write_remedy(error, folder)}") from error
    return ExpertFile(file, str(folder), dtype, shapes, local, offsets, True)


def expert_of(value: Any, expert: int) -> Tensor:
    """Return one expert's part of a tensor, or of an object with `entry.shape` and `read(window)`.
    """
    if isinstance(value, Tensor):
        return value[expert]
    full = tuple(slice(0, size) for size in value.entry.shape[1:])
    return value.read((slice(expert, expert + 1), *full))[0]


def given_file(path: str | os.PathLike[str], shapes: Shapes, place: Placement,
               layer: int | None) -> ExpertFile:
    """Open a safetensors file that contains the experts of a layer. The file is never changed.

    The name of each tensor in the file consists of a prefix and the name of a parameter. Each
    tensor [E, ...] contains one parameter of all experts of a layer. If the tensor names in the
    file have different prefixes, the first prefix belongs to the first layer, and so on.

    Args:
        path: path of the file.
        shapes: mapping from the name of a parameter to its shape for a single expert.
        place: placement that determines which experts this rank reads.
        layer: index of the layer in the file.
    Raises:
        ValueError: If the file is damaged, is not a safetensors file, does not contain this layer,
            or contains tensors with wrong shapes.
    """
    where = f"experts.store_path={short(str(path))}"
    if place.shards > 1:
        raise ValueError(f"{where} stores whole experts, but {place.shards} ranks share each "
                         "expert; use at most as many ranks as experts, or a folder")
    try:
        given = SafetensorsFile(path, verify=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"{where} is not a complete safetensors file ({short(error)}); use a "
                         "safetensors file or a folder") from error
    try:
        prefix, stored = _prefix(given.held, layer, where), dict(given.held)
        use_current_names(stored, prefix)
        offsets, dtypes = {}, set()
        for name, shape in shapes.items():
            held, want = stored.get(prefix + name), (place.experts, *shape)
            found = None if held is None else held.shape
            if held is None or found != want:
                raise ValueError(f"{where} has {prefix + name!r} of shape {found}, but the layer "
                                 f"needs {want}; use the file of this model")
            dtypes.add(held.dtype)
            one = held.nbytes // place.experts
            offsets[name] = held.offset + place.first_expert * one
        if len(dtypes) > 1 or not dtypes <= set(_DTYPES):
            raise ValueError(f"{where} has experts of dtypes {sorted(map(str, dtypes))}, but all "
                             "experts must have the same dtype, one of "
                             f"{', '.join(map(str, _DTYPES))}; convert the file")
        return ExpertFile(given.file, str(path), dtypes.pop(), shapes, place.local, offsets,
                          False)
    except BaseException:
        given.close()
        raise


def _prefix(header: Mapping[str, TierTensor], layer: int | None, where: str) -> str:
    found = sorted((name.removesuffix("w_in_LDF") for name in header if name.endswith("w_in_LDF")),
                   key=lambda name: [int(part) if part.isdigit() else part
                                     for part in re.split(r"(\d+)", name)])
    number = 0 if layer is None and len(found) == 1 else layer
    if number is None or number >= len(found):
        raise ValueError(f"{where} has {len(found)} layers with a 'w_in_LDF', but this layer has "
                         f"number {layer}; use the file of this model, and set the numbers of the "
                         "layers "
                         "(HostContext.layer_number)")
    return found[number]
