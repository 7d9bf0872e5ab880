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
from moe_plugin.checkpoint.formats.megatron import common, experts, neutral
from moe_plugin.checkpoint.neutral import NEUTRAL
from moe_plugin.checkpoint.source import CheckpointError, Source

_SIZES = frozenset({"world", "ep", "tp", "pp", "etp"})


class _Megatron(Format):
    sizes = _SIZES

    def detect(self, path: Path, trust: bool = False) -> bool:
        return (path.is_dir() and common.is_checkpoint(path)
                and common.format_of(path) == self.name)

    def open(self, path: Path, trust: bool = False) -> Source:
        from moe_plugin.checkpoint.formats.megatron.source import open_checkpoint

        found = open_checkpoint(path, trust)
        if found.format != self.name:
            raise CheckpointError(f"checkpoint {str(path)!r} is of format {found.format!r}, not "
                                  f"{self.name!r}")
        return found

    def write(self, source: Source, path: Path, layout: CheckpointSizes,
              progress: WriteProgress = WriteProgress()) -> None:
        """See `Format`. Megatron loads what is written at any parallel sizes."""
        from moe_plugin.checkpoint.formats.megatron.writer import write

        common.refuse_other_optimizers(source)
        write(source, path, layout, progress)


@formats.register("megatron")
class MegatronFormat(_Megatron):
    """Distributed checkpoints of Megatron with our experts, or without any.

    `SAVE` of the training script or of Megatron-LM's, or one of its folders `iter_...`.
    """

    name: ClassVar[str] = common.OURS
    views_as = {NEUTRAL: neutral.to_neutral}
    views_of = {NEUTRAL: neutral.from_neutral}


@formats.register("megatron_native")
class NativeFormat(_Megatron):
    """Distributed checkpoints of Megatron with its own experts.

    As its SequentialMLP, GroupedMLP and TEGroupedMLP write them.
    """

    name: ClassVar[str] = common.NATIVE
    views_as, views_of = {common.OURS: experts.to_ours}, {common.OURS: experts.to_native}
