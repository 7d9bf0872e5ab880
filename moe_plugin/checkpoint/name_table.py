"""Names of a format's tensors and neutral ones, as a table that is read in both directions.

A name has {n} in the place of a layer's number and {e} in that of an expert's. Where a format has
each expert in a tensor of its own, the neutral tensor has all of them on axis 0.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from moe_plugin.checkpoint.source import (
    MODEL,
    CheckpointError,
    Derived,
    Key,
    Source,
    TensorEntry,
    every,
    interleaved,
    item_of,
    joined,
    part_of,
    pieces_of,
    stacked,
    transposed,
)
from moe_plugin.experts.distributed_state import FLOAT32

# Which tensors of a model stay in float32 when the data type of the model changes.
#
# * By their name: biases that move by 0.001 and statistics that add up, which 16 bits would stop.
# * By what their layer says (`FLOAT32` of `Source.layers`, beginnings of names below it): what a
#   module keeps when its model is cast, such as a router under `router.fp32`.
# * Routers that are stored in more bits than the experts of their layer: somebody kept them there.

# last part of the name: the bias of `sigmoid_bias`; of Megatron and neutral; of Hugging Face; the
# quantiles of Megatron's quantile_balancing; running statistics of normalization
_NAMES = frozenset(("bias_E", "expert_bias", "e_score_correction_bias", "qb_beta", "running_mean",
                    "running_var"))
_ROUTERS = ("router.", "gate.", "gates.")

Layers = Mapping[str, Mapping[str, Any]]


def marked(derived: Iterable[Derived], layers: Layers) -> list[Derived]:
    """The tensors, with `TensorEntry.keeps_float32` where it holds."""
    tensors = list(derived)
    widest = _bytes_of_experts(tensors, layers)
    return [replace(one, entry=replace(one.entry, keeps_float32=True))
            if _stays(one.key, one.entry, layers, widest) else one for one in tensors]


def _stays(key: Key, entry: TensorEntry, layers: Layers, widest: Mapping[str, int]) -> bool:
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
    """Bytes of the widest number of each layer's experts."""
    found: dict[str, int] = {}
    for one in tensors:
        (field, name), dtype = one.key, one.entry.dtype
        layer, experts, _ = name.partition("experts.")
        if experts and field == MODEL and layer in layers and dtype.is_floating_point:
            found[layer] = max(found.get(layer, 0), dtype.itemsize)
    return found


KINDS = ("weight", "bias")
_NUMBER, _PLACE = re.compile(r"\d+"), re.compile(r"\{\w\}")
# makes what it becomes of a tensor that no rule names, or raises
Others = Callable[[Derived], Derived]


@dataclass(frozen=True)
class NameRule:
    """A tensor of a format, and the neutral ones that it holds.

    Attributes:
        theirs: its name.
        ours: neutral names, in the order in which it joins them.
        swap: its last two axes are the neutral ones' the other way round.
        axis: of it, along which the neutral tensors follow each other.
        shares: their sizes along it, as multiples of one another; empty: all alike.
        groups: it has so many groups one behind the other, each with a piece of every tensor.
        in_turn: elements of the tensors take turns along it.
        row: it is the neutral vector as a matrix of one row.
    """

    theirs: str
    ours: tuple[str, ...]
    swap: bool = False
    axis: int = 0
    shares: tuple[int, ...] = ()
    groups: int = 1
    in_turn: bool = False
    row: bool = False

    def split(self, one: Derived) -> list[Derived]:
        """The neutral tensors in one of the format's."""
        if len(self.ours) == 1:
            return [item_of(one, 0) if self.row else self._swapped(one)]
        if self.in_turn:
            return [self._swapped(every(one, first, len(self.ours), self.axis))
                    for first in range(len(self.ours))]
        shares = self.shares or (1,) * len(self.ours)
        unit = one.entry.shape[self.axis] // (self.groups * sum(shares))
        found: list[list[Derived]] = [[] for _ in shares]
        start, before = 0, (slice(None),) * self.axis
        for _ in range(self.groups):
            for pieces, share in zip(found, shares, strict=True):
                stop = start + share * unit
                pieces.append(part_of(one, (*before, slice(start, stop))))
                start = stop
        return [self._swapped(_whole(pieces, self.axis)) for pieces in found]

    def join(self, parts: Iterable[Derived]) -> Derived:
        """The reverse of `split`."""
        if self.row:
            return stacked(list(parts))
        if self.in_turn:
            return interleaved([self._swapped(part) for part in parts], self.axis)
        pieces = [pieces_of(self._swapped(part), self.groups, self.axis) if self.groups > 1
                  else [self._swapped(part)] for part in parts]
        return _whole([piece for group in zip(*pieces, strict=True) for piece in group], self.axis)

    def _swapped(self, one: Derived) -> Derived:
        axes = len(one.entry.shape)  # an optimizer's count of steps has none
        if not self.swap or axes < 2:
            return one
        return transposed(one, (*range(axes - 2), axes - 1, axes - 2))


def _whole(pieces: list[Derived], axis: int) -> Derived:
    return pieces[0] if len(pieces) == 1 else joined(pieces, axis)


class _Index:
    """Rules by the names that they have places in."""

    def __init__(self, rules: Iterable[tuple[str, NameRule]]) -> None:
        self._alike: dict[str, list[tuple[re.Pattern[str], NameRule]]] = {}
        for name, rule in rules:
            pattern = re.sub(r"\\\{(\w)\\\}", r"(?P<\1>\\d+)", re.escape(name))
            alike = self._alike.setdefault(_NUMBER.sub("0", _PLACE.sub("0", name)), [])
            alike.append((re.compile(pattern), rule))

    def find(self, name: str) -> list[tuple[NameRule, dict[str, str]]]:
        """Rules for a name, each with what is in its places."""
        return [(rule, found.groupdict())
                for pattern, rule in self._alike.get(_NUMBER.sub("0", name), ())
                if (found := pattern.fullmatch(name))]


class NameTable:
    """All rules of a format; where several are for one tensor of it, the first counts, and a
    neutral tensor is written under the names of all.
    """

    def __init__(self, rules: Iterable[NameRule]) -> None:
        self._order = {rule: place for place, rule in enumerate(rules)}
        self._theirs = _Index((rule.theirs, rule) for rule in self._order)
        self._ours = _Index((name, rule) for rule in self._order for name in rule.ours)

    def neutral_name(self, name: str) -> str:
        """The first neutral name of a tensor of the format; its own where there is none."""
        return next((rule.ours[0].format(**at) for rule, at in self._theirs.find(name)), name)

    def their_names(self, name: str, experts: int) -> list[str]:
        """The format's names of a neutral tensor of so many experts; its own without any."""
        found = [rule.theirs.format(**{"e": expert, **at}) for rule, at in self._ours.find(name)
                 for expert in range(experts if "{e}" in rule.theirs else 1)]
        return found or [name]

    def neutral(self, tensors: Iterable[Derived], others: Others,
                experts: int = 0) -> Iterator[Derived]:
        """Tensors of the format as neutral ones.

        Args:
            experts: in a layer; 0: as many as there are.
        Raises:
            CheckpointError: experts are missing, or not of the axes that their names say.
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
                    f"{name!r} in {field!r} has {count} experts, and there is none with number "
                    f"{lost[0]}: a file is missing, damaged or of another checkpoint")
            [whole] = rule.split(stacked([each[expert] for expert in range(count)]))
            yield _checked(whole, name)

    def theirs(self, source: Source, others: Others) -> Iterator[Derived]:
        """The neutral tensors of a source as the format's; those of single experts at the end,
        expert by expert.

        Raises:
            CheckpointError: some of the tensors that one of the format's joins are missing.
        """
        single: dict[Key, list[tuple[NameRule, dict[str, str], Derived]]] = {}
        for key in source.entries:
            found = self._ours.find(key[1])
            if not found:
                yield others(source.tensor(key))
            for rule, at in found:
                whole = rule.join([source.tensor(_needed(source, (key[0], name.format(**at)), rule))
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
    """With its neutral name, which says how many axes an expert's tensor has."""
    layer, experts, last = name.rpartition("experts.")
    if experts and one.key[0] == MODEL and len(last.rpartition("_")[2]) != len(one.entry.shape):
        raise CheckpointError(f"tensor {one.key[1]!r} has shape {one.entry.shape}, which is not "
                              f"that of {name!r}; get the checkpoint's files again")
    return one.renamed(name)


def _needed(source: Source, key: Key, rule: NameRule) -> Key:
    if key not in source.entries:
        raise CheckpointError(f"the {source.format} checkpoint has no {key[1]!r} in {key[0]!r}, "
                              f"which {rule.theirs!r} joins with others")
    return key


def same_parts(theirs: str, ours: str, names: Any) -> Iterator[NameRule]:
    """Rules of tensors that are the same but for their names.

    Args:
        theirs, ours: in front of all names.
        names: the format's -> neutral ones.
    """
    return (NameRule(theirs + name, (ours + neutral,)) for name, neutral in names.items())


def both_kinds(names: Any) -> dict[str, str]:
    """Names of linear maps or norms as those of their weights and biases."""
    return {f"{name}.{kind}": f"{neutral}.{kind}" for name, neutral in names.items()
            for kind in KINDS}
