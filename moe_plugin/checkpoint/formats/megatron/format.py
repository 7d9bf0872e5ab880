"""The formats `megatron` and `megatron_native`; importing this registers them.

What reads and writes them is imported where it is used: torch's distributed checkpoint takes about
a second, which other formats do not need.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from moe_plugin.checkpoint.formats.base import (
    CheckpointSizes,
    Format,
    WriteProgress,
    formats,
)
from moe_plugin.checkpoint.formats.megatron import folders
from moe_plugin.checkpoint.source import CheckpointError, Source

_SIZES = frozenset({"world", "ep", "tp", "pp", "etp"})


class _Megatron(Format):
    sizes = _SIZES

    def detect(self, path: Path) -> bool:
        """See `Format`."""
        return (path.is_dir() and folders.is_checkpoint(path)
                and folders.format_of(path) == self.name)

    def open(self, path: Path, trust: bool = False) -> Source:
        """See `Format`."""
        from moe_plugin.checkpoint.formats.megatron import source as sources

        found = sources.MegatronSource(path, trust)
        if found.format != self.name:
            found.close()
            raise CheckpointError(f"checkpoint {str(path)!r} is of format {found.format!r}, not "
                                  f"{self.name!r}")
        return found

    def write(self, source: Source, path: Path, layout: CheckpointSizes,
              progress: WriteProgress = WriteProgress()) -> None:
        """See `Format`. Megatron loads what is written at any parallel sizes."""
        from moe_plugin.checkpoint.formats.megatron.source import refuse_other_optimizers
        from moe_plugin.checkpoint.formats.megatron.writer import write

        refuse_other_optimizers(source)
        write(source, path, layout, progress)


@formats.register("megatron")
class MegatronFormat(_Megatron):
    """Distributed checkpoints of Megatron with our experts, or without any.

    `SAVE` of the training script or of Megatron-LM's, or one of its folders `iter_...`.
    """

    name: ClassVar[str] = "megatron"

    def to_neutral(self, source: Source) -> Source:
        """See `Format`."""
        from moe_plugin.checkpoint.formats.megatron import neutral

        return neutral.to_neutral(source)

    def from_neutral(self, source: Source) -> Source:
        """See `Format`."""
        from moe_plugin.checkpoint.formats.megatron import neutral

        return neutral.from_neutral(source)

    def from_format(self, source: Source) -> Source | None:
        """See `Format`."""
        from moe_plugin.checkpoint.formats.megatron import experts

        return experts.to_ours(source) if source.format == folders.NATIVE else None


@formats.register("megatron_native")
class NativeFormat(_Megatron):
    """Distributed checkpoints of Megatron with its own experts.

    As its SequentialMLP, GroupedMLP and TEGroupedMLP write them.
    """

    name: ClassVar[str] = "megatron_native"

    def to_neutral(self, source: Source) -> Source:
        """See `Format`."""
        from moe_plugin.checkpoint.formats.megatron import experts, neutral

        return neutral.to_neutral(experts.to_ours(source))

    def from_neutral(self, source: Source) -> Source:
        """See `Format`."""
        from moe_plugin.checkpoint.formats.megatron import experts, neutral

        return experts.to_native(neutral.from_neutral(source))

    def from_format(self, source: Source) -> Source | None:
        """See `Format`."""
        from moe_plugin.checkpoint.formats.megatron import experts

        return experts.to_native(source) if source.format == folders.OURS else None
