"""The formats `megatron` and `megatron_native`. Importing this module registers both formats.

Readers and writers are imported on first use. Importing torch's distributed checkpoint takes about
a second, and users of other formats do not need it.

Megatron's own experts and this package's experts differ in names and in the order of the axes, but
the values are equal.

    Megatron's own, all experts on axis 0            ours
    mlp.experts.experts.linear_fc1.weight  [E, F, D]      mlp.experts.w_in_LDF   [E, D, F]
        gated: [E, 2F, D], the gate first                 mlp.experts.w_gate_LDF [E, D, F]
    mlp.experts.experts.linear_fc2.weight  [E, D, F]      mlp.experts.w_out_LFD  [E, F, D]
    mlp.experts.experts.linear_fc1.bias    [E, F or 2F]   mlp.experts.b_in_LF, b_gate_LF
    mlp.experts.experts.linear_fc2.bias    [E, D]         mlp.experts.b_out_LD

In a distributed checkpoint, Megatron's SequentialMLP, GroupedMLP (weight1, weight2) and
TEGroupedMLP all use these names. The router, the expert bias, shared experts and all other tensors
have the same names in both formats. The optimizer state of a parameter is converted like the
parameter itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from moe_plugin.checkpoint.formats.base import CheckpointSizes, Format, WriteProgress, formats
from moe_plugin.checkpoint.formats.megatron import common, neutral
from moe_plugin.checkpoint.formats.megatron.common import NATIVE, OURS
from moe_plugin.checkpoint.name_table import NameRule, NameTable
from moe_plugin.checkpoint.neutral import NEUTRAL
from moe_plugin.checkpoint.source import MODEL, CheckpointError, Derived, Source, View

# Megatron's tensor below `mlp.experts.experts.` -> (our tensors in it, whether the last two axes
# are swapped)
PAIRS = {"linear_fc1.weight": (("w_gate_LDF", "w_in_LDF"), True),
         "linear_fc1.bias": (("b_gate_LF", "b_in_LF"), False),
         "linear_fc2.weight": (("w_out_LFD",), True), "linear_fc2.bias": (("b_out_LD",), False)}
GATES = ("w_gate_LDF", "b_gate_LF")


def _table(gated: Mapping[str, bool]) -> NameTable:
    """Build the table of expert names. `gated` states, for the name prefix of each MoE layer,
    whether the experts have gates.
    """
    return NameTable(
        NameRule(f"{prefix}experts.experts.{theirs}",
             tuple(f"{prefix}experts.{name}" for name in ours if has_gates or name not in GATES),
             swap=swap, axis=1)
        for prefix, has_gates in gated.items() for theirs, (ours, swap) in PAIRS.items())


def to_native(source: Source) -> Source:
    """Return a view of a `megatron` source in which the experts have the names and layout of
    Megatron's own experts.
    """
    names = _table({prefix: (MODEL, f"{prefix}experts.w_gate_LDF") in source.entries
                    for prefix in source.layers})
    kept = source.values.get("megatron")
    if kept:  # the measurements of a tuner apply to our layers only
        kept = {**kept, "objects": {name: value for name, value in kept["objects"].items()
                                    if ".mlp.tuner/" not in name}}
    ordered = _experts_first(source, [f"experts.{one}" for ours, _ in PAIRS.values()
                                      for one in ours])
    return View(source, names.theirs(ordered, _keep_others(source, NATIVE)), format=NATIVE,
                values={**source.values, **({"megatron": kept} if kept else {})})


def to_ours(source: Source) -> Source:
    """Return a view of a `megatron_native` source in which the experts have the names and layout of
    this package's experts.
    """
    names = _table({prefix: _gated(source, prefix) for prefix in source.layers})
    ordered = _experts_first(source, [f"experts.experts.{theirs}" for theirs in PAIRS])
    tensors = map(ordered.tensor, ordered.entries)
    return View(source, names.neutral(tensors, _keep_others(source, OURS)), format=OURS)


def _experts_first(source: Source, names: Sequence[str]) -> View:
    """Return a view of the source in which the experts' tensors come before all other tensors.
    Tensors are written in the order of this view.

    names: names of the experts' tensors, without the prefix of the layer.
    """
    fields = dict.fromkeys(field for field, _ in source.entries)
    first = [(field, prefix + name) for field in fields for prefix in source.layers
             for name in names if (field, prefix + name) in source.entries]
    return View(source, map(source.tensor, dict.fromkeys([*first, *source.entries])))


def _gated(source: Source, prefix: str) -> bool:
    """Return true if the first matrix of the experts also contains the gates (double width)."""
    first, second = (source.entries.get((MODEL, f"{prefix}experts.experts.linear_{name}.weight"))
                     for name in ("fc1", "fc2"))
    if first is None or second is None:
        raise CheckpointError(
            f"layer {prefix!r} has no experts.experts.linear_fc1.weight and linear_fc2.weight: "
            "experts of this type cannot be converted; keep the checkpoint's own format")
    return first.shape[1] == 2 * second.shape[2]


def _keep_others(source: Source, format: str) -> Any:
    """Return a function that handles tensors for which there is no name rule. The function keeps
    tensors that do not belong to experts, and raises an error for unknown tensors of experts.
    """
    def others(tensor: Derived) -> Derived:
        if any(tensor.key[1].startswith(prefix + "experts.") for prefix in source.layers):
            raise CheckpointError(
                f"{tensor.key[1]!r} has no counterpart in format {format!r}: only experts with two "
                "linear layers (and optionally a gate) can be converted; keep the checkpoint's own "
                "format")
        return tensor

    return others


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
    views_as, views_of = {common.OURS: to_ours}, {common.OURS: to_native}
