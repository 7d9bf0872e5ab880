"""The formats `megatron` and `megatron_native`. Importing this module registers both formats.

Readers and writers are imported on first use. Importing torch's distributed checkpoint takes about
a second, and users of other formats do not need it.
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

        source = open_checkpoint(path, trust)
        if source.format != self.name:
            raise CheckpointError(f"checkpoint {str(path)!r} has the format {source.format!r}, not "
                                  f"{self.name!r}; select its format with --from {source.format}")
        return source

    def write(self, source: Source, path: Path, layout: CheckpointSizes,
              progress: WriteProgress = WriteProgress()) -> None:
        """See `Format`. Megatron can load the checkpoint with any parallel sizes."""
        from moe_plugin.checkpoint.formats.megatron.writer import write

        common.refuse_other_optimizers(source)
        write(source, path, layout, progress)


@formats.register("megatron")
class MegatronFormat(_Megatron):
    """Distributed checkpoints of Megatron with this package's experts, or without experts.

    The path is the `SAVE` folder of the training script or of Megatron-LM, or an `iter_...` folder
    inside it.
    """

    name: ClassVar[str] = common.OURS
    views_as = {NEUTRAL: neutral.to_neutral}
    views_of = {NEUTRAL: neutral.from_neutral}


@formats.register("megatron_native")
class NativeFormat(_Megatron):
    """Distributed checkpoints of Megatron with Megatron's own experts.

    The checkpoints of SequentialMLP, GroupedMLP and TEGroupedMLP all have this format.
    """

    name: ClassVar[str] = common.NATIVE
    views_as, views_of = {common.OURS: experts.to_ours}, {common.OURS: experts.to_native}
