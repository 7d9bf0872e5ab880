"""The checkpoint formats that `moe-plugin reshard` and `moe-plugin inspect` support, and the
registry of formats.

The formats of each host framework are registered in a separate module, so that this package does
not depend on any host framework.
"""

from __future__ import annotations

import glob
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch

from moe_plugin.checkpoint import torch_files
from moe_plugin.checkpoint.source import (
    UNREADABLE,
    CheckpointError,
    Source,
    refuse_damaged,
    refused_if_unreadable,
)
from moe_plugin.checkpoint.trust import UntrustedFile
from moe_plugin.utils.registry import Registry


@dataclass(frozen=True, kw_only=True)
class CheckpointSizes:
    """The parallel sizes and the data type of a checkpoint that is about to be written. If a size
    is not set, the format chooses it.

    Attributes:
        world: total number of ranks. For fairseq, this is the number of data-parallel ranks.
        ep, tp, pp, etp: sizes of expert, tensor, pipeline and expert-tensor parallelism,
            respectively.
        shards: number of ranks among which each expert is split.
        dtype: data type of floating-point model tensors. For every format, the module `conversion`
            casts the tensors to this data type.
    """

    world: int | None = None
    ep: int | None = None
    tp: int | None = None
    pp: int | None = None
    etp: int | None = None
    shards: int | None = None
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name in self.given():
            value = getattr(self, name)  # a field of this dataclass
            if name != "dtype" and (type(value) is not int or value < 1):
                raise ValueError(f"layout {name}={value!r} is not valid: it must be an integer of "
                                 "at least 1")

    def one_group(self, usual: int) -> int:
        """Return the number of ranks for a format with one file per expert-parallel rank.

        Args:
            usual: default number of ranks if neither `world` nor `ep` is set.
        Raises:
            ValueError: If `world` and `ep` differ.
        """
        if None not in (self.world, self.ep) and self.world != self.ep:
            raise ValueError(f"--world {self.world} and --ep {self.ep} differ, but the format has "
                             "one file for each expert-parallel rank; use only one of the two "
                             "options")
        return self.ep or self.world or usual

    def given(self) -> tuple[str, ...]:
        """Return the names of the fields that are set."""
        return tuple(field.name for field in fields(self) if getattr(self, field.name) is not None)


class WriteProgress:
    """Callbacks through which a writer reports its progress. The methods of this base class do
    nothing.

    For each file, a writer calls `keeps(name)`, where `name` is the path within the written folder.
    If the return value is True, the writer skips the file. The writer calls `advance` while it
    writes bytes, and `wrote(name)` when a file is complete, closed and flushed to disk. The methods
    `advance` and `wrote` may be called from any thread.
    """

    def keeps(self, name: str) -> bool:
        """Return true if an interrupted conversion wrote this file and it is unchanged."""
        return False

    def advance(self, nbytes: int) -> None:
        """Record that `nbytes` more bytes were written or reused."""

    def wrote(self, name: str) -> None:
        """Record that the file `name` is complete."""


def write_files(path: Path, contents: Mapping[str, Callable[[], Any]],
                progress: WriteProgress) -> None:
    """Write files with `torch.save`. The contents may include `Derived` tensors. Files for which
    `progress.keeps` returns True are skipped.

    Args:
        path: an existing folder.
        contents: by file name, a function that builds the content of the file.
        progress: object to which the writer reports its progress.
    """
    with torch_files.SealedWriter(progress.advance) as writer:
        for name, make in contents.items():
            if not progress.keeps(name):
                writer.write(path / name, make(), partial(progress.wrote, name))


MakesView = Callable[[Source], Source]


class Format(ABC):
    """A checkpoint format. The first sentence of a subclass's docstring describes the format.

    Attributes:
        name: registered name.
        sizes: names of the `CheckpointSizes` fields that the format supports, excluding "dtype".
        views_as: functions that convert a source of this format to a view that uses the names of
            another format. The keys of `views_as` are the names of the target formats. The target
            "neutral" means the framework-independent names in `moe_plugin.checkpoint.neutral`. If
            the target format cannot represent a tensor or a setting, these functions raise a
            `CheckpointError` that names it.
        views_of: functions that convert a source of another format to a view that uses the names of
            this format. The keys of `views_of` are the names of the source formats.
        becomes: names of the only formats that this format can be converted to and from. If
            `becomes` is empty, this format can be converted to and from every format for which a
            conversion exists.
    """

    name: ClassVar[str]
    sizes: ClassVar[frozenset[str]] = frozenset()
    views_as: ClassVar[Mapping[str, MakesView]] = {}
    views_of: ClassVar[Mapping[str, MakesView]] = {}
    becomes: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def detect(self, path: Path, trust: bool = False) -> bool:
        """Return true if a file or folder is a checkpoint of this format. Only file names and
        headers are read.

        Args:
            path: file or folder to examine.
            trust: see `open`.
        Raises:
            UntrustedFile: If the format cannot be determined without unpickling classes that are
                not allowed.
        """

    @abstractmethod
    def open(self, path: Path, trust: bool = False) -> Source:
        """Open a checkpoint for reading without reading the values of tensors.

        Args:
            path: file or folder to examine.
            trust: whether to unpickle arbitrary classes, including those that are not allowed by
                default. Unpickling can run code that is stored in the files.
        Raises:
            CheckpointError: If a file is missing or damaged.
            UntrustedFile: If a file contains classes that are not allowed, and `trust` is False.
        """

    def write(self, source: Source, path: Path, layout: CheckpointSizes,
              progress: WriteProgress = WriteProgress()) -> None:
        """Write a checkpoint of this format into the folder `path`. Only one slice of a tensor is
        in memory at any time.

        The folder must exist. The folder is temporary, and it may contain files of an interrupted
        conversion (see `WriteProgress.keeps`).

        Args:
            source: a source whose tensors have the names of this format.
            path: the folder.
            layout: parallel sizes of the checkpoint to be written.
            progress: object to which the writer reports its progress.
        Raises:
            CheckpointError: If the format cannot store a tensor or a setting of the source. The
                error message names the tensor or setting.
        """
        raise CheckpointError(f"format {self.name!r} can only be read; choose another format with "
                              "--to")

    def nbytes(self, source: Source, layout: CheckpointSizes) -> int:
        """Estimate the total size in bytes of the tensors to write, for a progress bar."""
        return sum(entry.nbytes for entry in source.entries.values())

    def check(self, layout: CheckpointSizes) -> None:
        """Raise `ValueError` if `layout` sets a parallel size that the format does not support."""
        unknown = [name for name in layout.given() if name not in self.sizes]
        if unknown:
            flags = ", ".join(f"--{name}" for name in sorted(self.sizes)) or "none"
            raise ValueError(f"format {self.name!r} does not support --{unknown[0]}; supported "
                             f"options: {flags}")


def _named(name: str, value: type[Format]) -> None:
    given = value.__dict__.get("name")
    if given != name:
        raise ValueError(f"checkpoint format {name!r} has name={given!r}; both names must be equal")


formats: Registry[type[Format]] = Registry("checkpoint format", base=Format, check=_named)


def detect(path: str | Path, trust: bool = False) -> str:
    """Return the name of the format of a checkpoint.

    Args:
        path: folder or file of the checkpoint.
        trust: whether to unpickle arbitrary classes, including those that are not allowed by
            default. Unpickling can run code that is stored in the files.
    Raises:
        CheckpointError: If the path does not exist, or if it matches no format or more than one
            format.
        UntrustedFile: If the format cannot be determined without unpickling classes that are not
            allowed, and `trust` is False.
    """
    path, refused = Path(path), list[UntrustedFile]()
    unreadable: list[str] = []
    names = [name for name in formats.names()
             if _detects(name, path, trust, refused, unreadable)]
    if not names and refused:
        raise refused[0]
    if not names and not path.exists():
        raise CheckpointError(f"checkpoint {str(path)!r} does not exist; use the path of its "
                              "folder or file")
    if len(names) != 1:
        why = f" ({'; '.join(unreadable)})" if unreadable else ""
        problem = (f"matches several formats: {' and '.join(names)}" if names
                   else f"matches no known format{why}")
        raise CheckpointError(f"checkpoint {str(path)!r} {problem}; select its format with --from, "
                              f"one of {', '.join(formats.names())}")
    return names[0]


def _detects(name: str, path: Path, trust: bool, refused: list[UntrustedFile],
             unreadable: list[str]) -> bool:
    try:
        return formats.get(name)().detect(path, trust)
    except UntrustedFile as error:
        refused.append(error)
        return False
    except CheckpointError as error:
        unreadable.append(f"{name}: {error}")
        return False
    except UNREADABLE:  # the file may be damaged or of another format
        return False


def open_source(path: str | Path, format: str | None = None, trust: bool = False) -> Source:
    """Open a checkpoint for reading.

    Args:
        path: path of the checkpoint's folder or file.
        format: name of the format. Detected by default.
        trust: whether to unpickle arbitrary classes, including those that are not allowed by
            default. Unpickling can run code that is stored in the files.
    Raises:
        CheckpointError: If a file is missing, is damaged, or does not have this format.
        UntrustedFile: If a file contains classes that are not allowed, and `trust` is False.
    """
    path = Path(path)
    try:
        reader = formats.get(format or detect(path, trust))()
        with _of_format(f"checkpoint {str(path)!r}", reader.name):
            return reader.open(path, trust)
    # a damaged file can cause any other error, so damage is reported first
    except CheckpointError as error:
        files = path.iterdir() if path.is_dir() else path.parent.glob(f"{glob.escape(path.stem)}*")
        refuse_damaged(file for file in sorted(files) if str(file) not in str(error))
        raise


def _of_format(what: str, format: str) -> AbstractContextManager[None]:
    return refused_if_unreadable(f"{what} does not match format {format!r}",
                                 "use another checkpoint, or select its format with --from")


def check_pair(origin: str, to: str) -> None:
    """Raise `CheckpointError` if there is no conversion from one format to the other."""
    for name, other in ((origin, to), (to, origin)):
        known = formats.get(name).becomes
        if known and other not in (name, *known):
            raise CheckpointError(
                f"format {origin!r} cannot be converted to {to!r}: {name!r} is converted only to "
                f"and from {', '.join(known)} "
                "(conversions of fairseq's language models to other frameworks were removed; "
                "commit 0d376454 contains them)")


def convert(source: Source, to: str) -> Source:
    """Return a view of a source that uses the names of a different format, or framework-independent
    names.

    If there is no direct conversion between the two formats, the conversion uses intermediate
    formats.

    Raises:
        CheckpointError: If no conversion exists, if the target format cannot represent the source
            (see `Format.views_as`), or if a name in the source is not valid in its format.
    """
    with _of_format(f"the {source.format} checkpoint", source.format):
        for view in _shortest_way(source.format, to):
            source = view(source)
    return source


def _shortest_way(origin: str, to: str) -> list[MakesView]:
    steps: dict[tuple[str, str], MakesView] = {}
    for name in formats.names():
        steps |= {(name, other): view for other, view in formats.get(name).views_as.items()}
        steps |= {(other, name): view for other, view in formats.get(name).views_of.items()}
    ways: dict[str, list[MakesView]] = {origin: []}
    for reached_format in (reached := [origin]):
        for (start, end), view in steps.items():
            if start == reached_format and end not in ways:
                ways[end] = [*ways[reached_format], view]
                reached.append(end)
    if to not in ways:
        raise CheckpointError(f"format {origin!r} cannot be converted to {to!r}; possible targets: "
                              f"{', '.join(reached)}")
    return ways[to]
