"""Parsers for the JSON lines that this package writes.

The lines contain layer statistics, the training log of the Megatron host, settings and timelines.
All functions in this module raise `ValueError` if a field has the wrong type.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from math import isnan
from typing import Any, TypeVar

from moe_plugin.observe.history.records import (
    CopyRecord,
    DecisionRecord,
    LayerRecord,
    SpanRecord,
    StepRecord,
)
from moe_plugin.utils.messages import short
from moe_plugin.utils.statistics import statistics

Record = TypeVar("Record")
LARGEST, MOST_STEPS = 1e30, 1e15  # larger values would overflow when figures are computed
ERRORS = "oracle_error", "top1_error", "member_error"  # the errors of an ensemble
_BALANCE = ("max_over_mean", "drop_fraction", "unused_experts", "entropy")


def layer_record(row: Mapping[str, Any]) -> LayerRecord:
    """Convert a JSON line to the record of one layer."""
    # interned, because a long log would otherwise keep the same string a hundred thousand times
    step, layer = _step(row, "step"), sys.intern(str(row["layer"]))
    return _filled(LayerRecord, row, step=step, layer=layer,
                   load=_loads(_list(row, "load")), more=_more(row),
                   decisions=tuple(_decision(step, layer, d) for d in _list(row, "decisions")))


def _more(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the additional statistics by name. The report plots these statistics, but
    `LayerRecord` has no attributes for them.
    """
    known, found = _fields(LayerRecord), _NONE
    for name, value in row.items():
        statistic = None if name in known or value is None else statistics.find(name)
        if statistic is not None and statistic.charts:
            numbers = _numbers(row, name) if isinstance(value, dict) else _number(value, name)
            found = {**found, name: numbers}
    return found


def _loads(values: list[Any]) -> Sequence[float]:
    """Return the loads of all experts as an array that uses 2, 4 or 8 bytes per load.

    Compact arrays save memory, because a long log contains millions of loads.
    """
    kinds = {*map(type, values)}
    try:
        if kinds == {int}:
            return array("H" if 0 <= min(values) and max(values) < 1 << 16 else "i", values)
        if kinds == {float} and max(map(abs, values)) <= LARGEST and not any(map(isnan, values)):
            return array("d", values)
    except OverflowError:
        pass
    return tuple([_number(value, "load") for value in values])  # raises an error with the value


def copy_record(row: Mapping[str, Any]) -> CopyRecord:
    """Convert a JSON line to the record of one copier."""
    return _filled(CopyRecord, row, step=_step(row, "step"), copier=str(row["copier"]),
                   ranks=max(1.0, _maybe(row, "ranks") or 1.0))


def step_record(row: Mapping[str, Any]) -> tuple[StepRecord, list[LayerRecord]]:
    """Convert a JSON line to a record of the training log and to the brief layer records in the
    same line.

    Brief layer records do not contain the loads of the experts. Brief layer records are used only
    for layers without any other records.
    """
    step = _step(row, "iteration")
    record = _filled(StepRecord, row, step=step, loss=_maybe(row, "lm_loss"),
                     learning_rate=_maybe(row, "lr"), elapsed_s=None,
                     extra={**_mean_losses(row), **_errors(row)},
                     confidence={
                         str(name): tuple(_number(n, "confidence") for n in _list(counts, name))
                         for counts in [_dict(row, "confidence")] for name in counts})
    layers = [LayerRecord(step=step, layer=str(name), **_floats(balance, *_BALANCE))
              for name, balance in _dict(row, "balance").items() if isinstance(balance, dict)]
    return record, layers


# the numbers of a training loop in a record, which are fields of StepRecord
TRAINING = ("loss", "tokens_per_s", "learning_rate", "grad_norm", "not_finite")


def training_record(row: Mapping[str, Any]) -> StepRecord:
    """Convert a JSON line to the record of a training step. These lines are written by training
    loops that have no other log.
    """
    return StepRecord(step=_step(row, "step"), **_floats(_dict(row, "training"), *TRAINING))


def timeline(row: Mapping[str, Any]) -> tuple[int, int, list[SpanRecord]]:
    """Convert a JSON line to a timeline. Return the step, the rank and the spans of the timeline.
    """
    spans = [
        SpanRecord(str(track), str(name), _finite(start), _finite(end))
        for track, name, start, end in _list(row, "timeline")
    ]
    return _step(row, "step"), int(_maybe(row, "rank") or 0), spans


def settings(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings of the run, which a host has written to a JSON line."""
    return {str(key).replace("_", "-"): str(value)
            for key, value in _dict(row, "settings").items() if value is not None}


def changed(row: Mapping[str, Any]) -> dict[str, tuple[str, str]] | None:
    """For each setting that differs from its default, return a pair (value as written, default).
    Return None if the JSON line does not contain these settings. Raise `ValueError` if a setting is
    not a pair of strings.
    """
    if "changed" not in row:
        return None
    return {str(name): pair_of(pair) for name, pair in _dict(row, "changed").items()}


def pair_of(pair: Any) -> tuple[str, str]:
    """Convert a two-item list to the pair (value, default) of a setting. Raise `ValueError` for any
    other value.
    """
    if not isinstance(pair, list) or len(pair) != 2:
        raise ValueError(f"{short(pair)} is not a pair (value, default) of a setting")
    return str(pair[0]), str(pair[1])


def _mean_losses(row: Mapping[str, Any]) -> dict[str, float]:
    # Megatron's list contains a 0 for every layer without experts
    found = {}
    for name, values in _dict(row, "aux_losses").items():
        present = [_number(v, name) for v in values if v] if isinstance(values, list) else []
        if present:
            found[f"loss {name}"] = sum(present) / len(present)
    return found


def _errors(row: Mapping[str, Any]) -> dict[str, float]:
    kind = "valid " if row.get("valid_loss") is not None else ""
    return {kind + name: value for name in ERRORS if (value := _maybe(row, name)) is not None}


def _decision(step: int, layer: str, row: Any) -> DecisionRecord:
    if not isinstance(row, dict):
        raise ValueError(f"decision {short(row)} is not a JSON object")
    call = _maybe(row, "call")
    return DecisionRecord(step=step, layer=layer, call=None if call is None else int(call),
                          event=str(row.get("event", "")), choice=str(row.get("choice", "")),
                          why=str(row.get("why", "")), **_floats(row, "predicted_s", "measured_s"))


@functools.cache
def _fields(kind: Any) -> dict[str, bool]:
    """For each field of a record class, return whether the field stores a dict of numbers."""
    return {field.name: field.default_factory is dict
            for field in dataclasses.fields(kind) if field.init}


@functools.cache
def _absent(kind: Any) -> dict[str, Any]:
    """Return an empty dict for each field of a record class that stores a dict. An empty dict is
    used for each field that is missing in a JSON line. All records share the same empty dict to
    save memory.
    """
    return {name: _NONE for name, by_name in _fields(kind).items() if by_name}


@functools.lru_cache(maxsize=1 << 8)  # the lines of a log have few different sets of names
def _read_fields(kind: Any, names: tuple[str, ...], given: tuple[str, ...]
                 ) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the fields in a JSON line as two tuples: fields that store a number, and
    fields that store a dict of numbers.
    """
    fields = {name: by_name for name, by_name in _fields(kind).items()
              if name in names and name not in given}
    return (tuple(name for name, by_name in fields.items() if not by_name),
            tuple(name for name, by_name in fields.items() if by_name))


def _filled(kind: Callable[..., Record], row: Mapping[str, Any], **given: Any) -> Record:
    """Build a record from the given fields and the numeric fields of a JSON line."""
    numbers, dicts = _read_fields(kind, tuple(row), tuple(given))
    found = {**_absent(kind), **given}
    for name in dicts:
        if row[name]:
            found[name] = _numbers(row, name)
    for name in numbers:
        value = row[name]
        if value is not None:
            plain = type(value) in _PLAIN and -LARGEST <= value <= LARGEST
            found[name] = value if plain else _number(value, name)
    return kind(**found)


_NONE: dict[str, Any] = {}  # shared by all records that lack a dict of numbers
_PLAIN = {int, float}  # without bool


@functools.lru_cache(maxsize=1 << 10)  # bounded, because a training run also parses its records
def _shared(*items: tuple[str, float]) -> dict[str, float]:
    """Return the same cached dict for equal items, because a long log repeats many dicts."""
    return dict(items)


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} is {short(value)}, not a number")
    if LARGEST < abs(value) < math.inf:
        raise ValueError(f"{name} is {short(value)}, which is larger than {LARGEST:g}")
    return value


def _finite(value: Any) -> float:
    if not math.isfinite(_number(value, "timeline")):
        raise ValueError(f"timeline is {value}, not a time")
    return value


def _maybe(row: Mapping[str, Any], name: str) -> float | None:
    return None if row.get(name) is None else _number(row[name], name)


def _floats(row: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: _maybe(row, name) for name in names}


def _step(row: Mapping[str, Any], name: str) -> int:
    return step_number(_number(row.get(name), name), name)


def step_number(value: float, name: str) -> int:
    """Convert a JSON value to a step number. Raise `ValueError` if the value is not a valid step
    number.
    """
    if not 0 <= value <= MOST_STEPS:
        raise ValueError(f"{name} is {short(value)}, not a number of steps")
    return int(value)


def _list(row: Mapping[str, Any], name: str) -> list[Any]:
    value = row.get(name) or []
    if not isinstance(value, list):
        raise ValueError(f"{name} is not a list")
    return value


def _dict(row: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = row.get(name) or {}
    if not isinstance(value, dict):
        raise ValueError(f"{name} is not a JSON object")
    return value


def _numbers(row: Mapping[str, Any], name: str) -> dict[str, float]:
    found = _dict(row, name)
    whole = True
    for value in found.values():
        if type(value) not in _PLAIN or not -LARGEST <= value <= LARGEST:
            return {str(key): _number(value, name)
                    for key, value in found.items() if value is not None}
        whole = whole and type(value) is int
    return _shared(*found.items()) if whole else {
        sys.intern(key): value for key, value in found.items()}
