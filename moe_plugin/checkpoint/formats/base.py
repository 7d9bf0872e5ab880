"""Formats of checkpoints by name: what `moe-plugin reshard` and `inspect` read and write.

A host registers its formats in a module of its own, so that this room needs no host.
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
    """How many ranks a written checkpoint is for; None: the format's own choice.

    Attributes:
        world: ranks in total (data-parallel ranks for fairseq).
        ep, tp, pp, etp: sizes of expert, tensor, pipeline and expert-tensor parallelism.
        shards: ranks over which each expert is cut.
        dtype: of floating-point model tensors; `conversion` changes it for every format.
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
                raise ValueError(f"layout {name}={value!r}: must be at least 1")

    def one_group(self, usual: int) -> int:
        """Ranks, where each writes a file and all share the experts; `ValueError` where `world` and
        `ep` differ.
        """
        if None not in (self.world, self.ep) and self.world != self.ep:
            raise ValueError(f"--world {self.world} and --ep {self.ep} differ: the format has a "
                             "file for each expert-parallel rank; give one of the two")
        return self.ep or self.world or usual

    def given(self) -> tuple[str, ...]:
        """Names of the fields that are set."""
        return tuple(one.name for one in fields(self) if getattr(self, one.name) is not None)


class WriteProgress:
    """What a writer tells its caller; this one ignores it and keeps nothing.

    A writer asks `keeps(name)` for each file (a path within the folder that it writes), skips the
    file where that is True, calls `advance` as bytes are written, and `wrote(name)` when the file
    is complete, closed and flushed to disk; `advance` and `wrote` by any thread.
    """

    def keeps(self, name: str) -> bool:
        """Whether an interrupted conversion completed this file and it is what it wrote."""
        return False

    def advance(self, nbytes: int) -> None:
        """So many bytes more are done, written or kept."""

    def wrote(self, name: str) -> None:
        """The file is complete."""


def write_files(path: Path, contents: Mapping[str, Callable[[], Any]],
                progress: WriteProgress) -> None:
    """Write files of `torch.save` with `Derived` tensors; those that `progress` keeps are not made.

    Args:
        path: an existing folder.
        contents: by the file's name, what makes its content.
    """
    with torch_files.SealedWriter(progress.advance) as writer:
        for name, make in contents.items():
            if not progress.keeps(name):
                writer.write(path / name, make(), partial(progress.wrote, name))


MakesView = Callable[[Source], Source]


class Format(ABC):
    """One format of checkpoints. Its docstring's first sentence says what it is.

    Attributes:
        name: as registered.
        sizes: fields of `CheckpointSizes` that it knows, without "dtype".
        views_as, views_of: what makes a view of a source of this format with the names of another
            one, and of a source of another one with the names of this; "neutral" stands for the
            names of `moe_plugin.checkpoint.neutral`. They raise `CheckpointError` where a tensor or
            setting has no place there, by its name.
        becomes: formats that it is converted to and from; empty: all to which there is a way.
    """

    name: ClassVar[str]
    sizes: ClassVar[frozenset[str]] = frozenset()
    views_as: ClassVar[Mapping[str, MakesView]] = {}
    views_of: ClassVar[Mapping[str, MakesView]] = {}
    becomes: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def detect(self, path: Path, trust: bool = False) -> bool:
        """Whether a file or folder is a checkpoint of this format, from names and headers alone.

        Args:
            path: the file or folder.
            trust: see `open`.
        Raises:
            UntrustedFile: it cannot be told without classes that are not listed.
        """

    @abstractmethod
    def open(self, path: Path, trust: bool = False) -> Source:
        """Open for reading; tensors stay on disk.

        Args:
            trust: unpickle classes that are not listed, which can run code in the files.
        Raises:
            CheckpointError: a file is missing or damaged.
            UntrustedFile: it holds other classes and `trust` is off.
        """

    def write(self, source: Source, path: Path, layout: CheckpointSizes,
              progress: WriteProgress = WriteProgress()) -> None:
        """Write a source that has this format's names into the folder `path`, slice by slice.

        The folder exists, has another name than the checkpoint will have, and may have files of an
        interrupted conversion (`WriteProgress.keeps`).

        Raises:
            CheckpointError: the source has something that the format cannot hold; by name.
        """
        raise CheckpointError(f"format {self.name!r} is read only; choose another --to")

    def nbytes(self, source: Source, layout: CheckpointSizes) -> int:
        """About how many bytes of tensors `write` writes, for a progress bar."""
        return sum(entry.nbytes for entry in source.entries.values())

    def check(self, layout: CheckpointSizes) -> None:
        """`ValueError` where the layout has a size that the format does not know."""
        unknown = [name for name in layout.given() if name not in self.sizes]
        if unknown:
            flags = ", ".join(f"--{name}" for name in sorted(self.sizes)) or "none"
            raise ValueError(f"format {self.name!r} has no --{unknown[0]}; it knows: {flags}")


def _named(name: str, value: type[Format]) -> None:
    given = value.__dict__.get("name")
    if given != name:
        raise ValueError(f"checkpoint format {name!r} has name={given!r}; must be the same")


formats: Registry[type[Format]] = Registry("checkpoint format", base=Format, check=_named)


def detect(path: str | Path, trust: bool = False) -> str:
    """Name of the format of a checkpoint.

    Args:
        path: its folder or file.
        trust: unpickle classes that are not listed, which can run code in the files.
    Raises:
        CheckpointError: nothing is there, or no format or more than one knows it.
        UntrustedFile: its format cannot be told without other classes and `trust` is off.
    """
    path, refused = Path(path), list[UntrustedFile]()
    unreadable: list[str] = []
    found = [name for name in formats.names()
             if _detects(name, path, trust, refused, unreadable)]
    if not found and refused:
        raise refused[0]
    if not found and not path.exists():
        raise CheckpointError(f"there is no checkpoint {str(path)!r}; give its folder or file")
    if len(found) != 1:
        why = f" ({'; '.join(unreadable)})" if unreadable else ""
        what = f"could be {' or '.join(found)}" if found else f"is of no known format{why}"
        raise CheckpointError(f"checkpoint {str(path)!r} {what}; name its format with --from, one "
                              f"of {', '.join(formats.names())}")
    return found[0]


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
    except UNREADABLE:  # what a file may hold that is of another format, or damaged
        return False


def open_source(path: str | Path, format: str | None = None, trust: bool = False) -> Source:
    """Open a checkpoint for reading.

    Args:
        path: its folder or file.
        format: its name; None: detected.
        trust: unpickle classes that are not listed, which can run code in the files.
    Raises:
        CheckpointError: a file is missing, damaged, or holds something else than the format.
        UntrustedFile: it holds other classes and `trust` is off.
    """
    path = Path(path)
    try:
        reader = formats.get(format or detect(path, trust))()
        with _of_format(f"checkpoint {str(path)!r}", reader.name):
            return reader.open(path, trust)
    except CheckpointError as error:  # damage may look like anything else
        files = path.iterdir() if path.is_dir() else path.parent.glob(f"{glob.escape(path.stem)}*")
        refuse_damaged(file for file in sorted(files) if str(file) not in str(error))
        raise


def _of_format(what: str, format: str) -> AbstractContextManager[None]:
    return refused_if_unreadable(f"{what} holds something else than format {format!r}",
                                 "use another checkpoint, or name its format with --from")


def check_pair(origin: str, to: str) -> None:
    """`CheckpointError` where a format is not converted to another one."""
    for name, other in ((origin, to), (to, origin)):
        known = formats.get(name).becomes
        if known and other not in (name, *known):
            raise CheckpointError(
                f"format {origin!r} does not become {to!r}: {name!r} is converted to and from "
                f"{', '.join(known)} alone (conversions of fairseq's language models to other "
                "frameworks were removed: commit 0d376454 has them)")


def convert(source: Source, to: str) -> Source:
    """A view of a source with the names of another format, or neutral ones, by way of others where
    there is no direct one.

    Raises:
        CheckpointError: there is no way; see `Format.views_as`; the source holds something else
            than its format.
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
    for here in (reached := [origin]):
        for (start, end), view in steps.items():
            if start == here and end not in ways:
                ways[end] = [*ways[here], view]
                reached.append(end)
    if to not in ways:
        raise CheckpointError(f"format {origin!r} does not become {to!r}; it becomes one of: "
                              f"{', '.join(reached)}")
    return ways[to]
