"""Rules that convert the tensor names of a format to framework-independent ("neutral") names and
back.

In the names of a rule, {n} stands for a layer index and {e} for an expert index. If a format stores
each expert in a separate tensor, the framework-independent tensor contains all experts along axis
0.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from moe_plugin.checkpoint.derived import (
    every,
    interleaved,
    item_of,
    joined,
    part_of,
    pieces_of,
    stacked,
    transposed,
)
from moe_plugin.checkpoint.source import MODEL, CheckpointError, Derived, Key, Source, TensorEntry
from moe_plugin.experts.distributed_state import FLOAT32

# Which tensors of a model stay in float32 when the data type of the model changes.
#
# * By name: biases that move by 0.001 and accumulated statistics, which 16 bits would freeze.
# * By layer (`FLOAT32` of `Source.layers`, name prefixes below the layer): tensors that a module
#   keeps in float32 when its model is cast, such as a router under `router.fp32`.
# * Routers stored in more bits than the experts of their layer, because that was chosen on purpose.

# last part of the name, in this order: the bias of `sigmoid_bias`; the bias in Megatron and in
# neutral names; the bias in Hugging Face; the quantiles of Megatron's quantile_balancing; running
# statistics of normalization
_NAMES = frozenset(("bias_E", "expert_bias", "e_score_correction_bias", "qb_beta", "running_mean",
                    "running_var"))
_ROUTERS = ("router.", "gate.", "gates.")

Layers = Mapping[str, Mapping[str, Any]]


def marked(derived: Iterable[Derived], layers: Layers) -> list[Derived]:
    """Set `keeps_float32` for the tensors that must stay in float32, and return all tensors."""
    tensors = list(derived)
    widest = _bytes_of_experts(tensors, layers)
    return [replace(one, entry=replace(one.entry, keeps_float32=True))
            if _keeps_float32(one.key, one.entry, layers, widest) else one for one in tensors]


def _keeps_float32(key: Key, entry: TensorEntry, layers: Layers, widest: Mapping[str, int]) -> bool:
    field, name = key
    if field != MODEL or not entry.dtype.is_floating_point:
        return False
    if name.rpartition(".")[2] in _NAMES:
        return True
    for part in _ROUTERS:
        layer, found, _ = name.partition(part)
        if found and layer in layers:
            kept = tuple(layers[layer].get(FLOAT32, ()))
            wider = entry.dtype.itemsize >= torch.float32.itemsize > widest.get(layer, 4)
            return wider or name.removeprefix(layer).startswith(kept)
    return False


def _bytes_of_experts(tensors: Iterable[Derived], layers: Layers) -> dict[str, int]:
    """For each layer, return the bytes per element of its experts' widest floating-point type."""
    widest: dict[str, int] = {}
    for tensor in tensors:
        (field, name), dtype = tensor.key, tensor.entry.dtype
        layer, experts, _ = name.partition("experts.")
        if experts and field == MODEL and layer in layers and dtype.is_floating_point:
            widest[layer] = max(widest.get(layer, 0), dtype.itemsize)
    return widest


KINDS = ("weight", "bias")
_NUMBER, _PLACE = re.compile(r"\d+"), re.compile(r"\{\w\}")
# converts a tensor that no rule names, or raises
Others = Callable[[Derived], Derived]


@dataclass(frozen=True)
class NameRule:
    """A rule that maps one tensor of a format to the framework-independent tensors that it
    contains.

    Attributes:
        theirs: name of the tensor in the format.
        ours: names of the framework-independent tensors, in the order in which they are stored in
            the format's tensor.
        swap: whether the last two axes of the format's tensor are swapped relative to the
            framework-independent tensors.
        axis: axis of the format's tensor along which the framework-independent tensors are
            concatenated.
        shares: relative sizes of the framework-independent tensors along `axis`, or an empty tuple
            if all sizes are equal.
        groups: number of consecutive groups along `axis`. Each group contains a slice of every
            framework-independent tensor.
        in_turn: whether slices of the framework-independent tensors alternate along `axis`.
        row: whether the format stores the vector as a matrix with one row.
    """

    theirs: str
    ours: tuple[str, ...]
    swap: bool = False
    axis: int = 0
    shares: tuple[int, ...] = ()
    groups: int = 1
    in_turn: bool = False
    row: bool = False

    def split(self, tensor: Derived) -> list[Derived]:
        """Split a tensor of the format into its framework-independent tensors."""
        if len(self.ours) == 1:
            return [item_of(tensor, 0) if self.row else self._swapped(tensor)]
        if self.in_turn:
            return [self._swapped(every(tensor, first, len(self.ours), self.axis))
                    for first in range(len(self.ours))]
        shares = self.shares or (1,) * len(self.ours)
        unit = tensor.entry.shape[self.axis] // (self.groups * sum(shares))
        pieces_by_tensor: list[list[Derived]] = [[] for _ in shares]
        start, before = 0, (slice(None),) * self.axis
        for _ in range(self.groups):
            for pieces, share in zip(pieces_by_tensor, shares, strict=True):
                stop = start + share * unit
                pieces.append(part_of(tensor, (*before, slice(start, stop))))
                start = stop
        return [self._swapped(_joined(pieces, self.axis)) for pieces in pieces_by_tensor]

    def join(self, parts: Iterable[Derived]) -> Derived:
        """Join framework-independent tensors into a tensor of the format; inverse of `split`."""
        if self.row:
            return stacked(list(parts))
        if self.in_turn:
            return interleaved([self._swapped(part) for part in parts], self.axis)
        pieces = [pieces_of(self._swapped(part), self.groups, self.axis) if self.groups > 1
                  else [self._swapped(part)] for part in parts]
        return _joined([piece for group in zip(*pieces, strict=True) for piece in group], self.axis)

    def _swapped(self, tensor: Derived) -> Derived:
        axes = len(tensor.entry.shape)  # an optimizer's step counter has no axes
        if not self.swap or axes < 2:
            return tensor
        return transposed(tensor, (*range(axes - 2), axes - 1, axes - 2))


def _joined(pieces: list[Derived], axis: int) -> Derived:
    return pieces[0] if len(pieces) == 1 else joined(pieces, axis)


class _Index:
    """An index of rules by tensor name. Numbers in a name match the placeholders of a rule."""

    def __init__(self, rules: Iterable[tuple[str, NameRule]]) -> None:
        self._alike: dict[str, list[tuple[re.Pattern[str], NameRule]]] = {}
        for name, rule in rules:
            pattern = re.sub(r"\\\{(\w)\\\}", r"(?P<\1>\\d+)", re.escape(name))
            alike = self._alike.setdefault(_NUMBER.sub("0", _PLACE.sub("0", name)), [])
            alike.append((re.compile(pattern), rule))

    def find(self, name: str) -> list[tuple[NameRule, dict[str, str]]]:
        """Return all rules that match a name, each with the values of its placeholders."""
        return [(rule, match.groupdict())
                for pattern, rule in self._alike.get(_NUMBER.sub("0", name), ())
                if (match := pattern.fullmatch(name))]


class NameTable:
    """All name rules of a format.

    If several rules match a tensor name of the format, the first of these rules is used. A
    framework-independent tensor is written under the name of every rule that matches it.
    """

    def __init__(self, rules: Iterable[NameRule]) -> None:
        self._order = {rule: place for place, rule in enumerate(rules)}
        self._theirs = _Index((rule.theirs, rule) for rule in self._order)
        self._ours = _Index((name, rule) for rule in self._order for name in rule.ours)

    def neutral_name(self, name: str) -> str:
        """Return the framework-independent name for a tensor name of this format. If the first
        matching rule lists several names, return the first of them. If no rule matches, return
        `name` unchanged.
        """
        return next((rule.ours[0].format(**at) for rule, at in self._theirs.find(name)), name)

    def their_names(self, name: str, experts: int) -> list[str]:
        """Return the names under which the format stores a framework-independent tensor with
        `experts` experts. If no rule matches, return only `name`.
        """
        names = [rule.theirs.format(**{"e": expert, **at}) for rule, at in self._ours.find(name)
                 for expert in range(experts if "{e}" in rule.theirs else 1)]
        return names or [name]

    def neutral(self, tensors: Iterable[Derived], others: Others,
                experts: int = 0) -> Iterator[Derived]:
        """Convert tensors of the format to framework-independent tensors and yield them.

        Args:
            tensors: tensors of the format.
            others: function that is called for each tensor whose name matches no rule. `others`
                converts the tensor or raises an error.
            experts: number of experts in a layer, or 0 if it must be determined from the tensors.
        Raises:
            CheckpointError: If an expert is missing, or if an expert's tensor has a wrong number of
                axes.
        """
        single: dict[Key, tuple[NameRule, dict[int, Derived]]] = {}
        for one in tensors:
            rule, at = next(iter(self._theirs.find(one.key[1])), (None, {}))
            if rule is None:
                yield others(one)
            elif "e" in at:
                key = one.key[0], rule.ours[0].format(**at)
                single.setdefault(key, (rule, {}))[1][int(at["e"])] = one
            else:
                for name, part in zip(rule.ours, rule.split(one), strict=True):
                    yield _checked(part, name.format(**at))
        for (field, name), (rule, each) in single.items():
            count = experts or max(each) + 1
            if lost := sorted(set(range(count)) - set(each)):
                raise CheckpointError(
                    f"{name!r} in {field!r} has {count} experts, but expert {lost[0]} is missing: "
                    "a file is missing, is damaged or belongs to another checkpoint")
            [whole] = rule.split(stacked([each[expert] for expert in range(count)]))
            yield _checked(whole, name)

    def theirs(self, source: Source, others: Others) -> Iterator[Derived]:
        """Convert the framework-independent tensors of a source to tensors of the format and yield
        them.

        Tensors that contain a single expert are yielded last, one expert after another.

        Raises:
            CheckpointError: If a tensor of the format cannot be built because one of its
                framework-independent tensors is missing.
        """
        single: dict[Key, list[tuple[NameRule, dict[str, str], Derived]]] = {}
        for key in source.entries:
            matches = self._ours.find(key[1])
            if not matches:
                yield others(source.tensor(key))
            for rule, at in matches:
                whole = rule.join([
                    source.tensor(_required_key(source, (key[0], name.format(**at)), rule))
                    for name in rule.ours])
                if "{e}" in rule.theirs:
                    layer = rule.theirs.partition("{e}")[0].format(**at)
                    single.setdefault((key[0], layer), []).append((rule, at, whole))
                elif key[1] == rule.ours[0].format(**at):
                    yield whole.renamed(rule.theirs.format(**at))
        for parts in single.values():
            parts.sort(key=lambda part: self._order[part[0]])
            for expert in range(parts[0][2].entry.shape[0]):
                for rule, at, whole in parts:
                    yield item_of(whole, expert).renamed(rule.theirs.format(**{**at, "e": expert}))


def _checked(one: Derived, name: str) -> Derived:
    """Rename a tensor. Raise `CheckpointError` unless the tensor of an expert has the number of
    axes that its framework-independent name implies.
    """
    layer, experts, last = name.rpartition("experts.")
    if experts and one.key[0] == MODEL and len(last.rpartition("_")[2]) != len(one.entry.shape):
        raise CheckpointError(f"tensor {one.key[1]!r} has shape {one.entry.shape}, which does not "
                              f"match {name!r}; download or copy the checkpoint's files again")
    return one.renamed(name)


def _required_key(source: Source, key: Key, rule: NameRule) -> Key:
    if key not in source.entries:
        raise CheckpointError(f"the {source.format} checkpoint has no {key[1]!r} in {key[0]!r}, "
                              f"which is needed to build {rule.theirs!r}")
    return key


def same_parts(theirs: str, ours: str, names: Any) -> Iterator[NameRule]:
    """Yield rules that only rename tensors.

    Args:
        theirs, ours: prefixes of all names of the format, and of all framework-independent names.
        names: mapping from the names of the format to framework-independent names, both without
            prefixes.
    """
    return (NameRule(theirs + name, (ours + neutral,)) for name, neutral in names.items())


def both_kinds(names: Any) -> dict[str, str]:
    """Expand the names of linear layers or norms to the names of their weights and their biases."""
    return {f"{name}.{kind}": f"{neutral}.{kind}" for name, neutral in names.items()
            for kind in KINDS}
