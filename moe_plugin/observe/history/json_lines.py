"""JSON lines of our own: layer statistics, the Megatron host's training log, settings, timelines.
Told apart by their keys.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from moe_plugin.observe.history.records import Decision, LayerRecord, Span, StepRecord


def is_layer(row: Mapping[str, Any]) -> bool:
    """Whether it is a record of `observe.jsonl`."""
    return "layer" in row and "step" in row and "load" in row


def is_step(row: Mapping[str, Any]) -> bool:
    """Whether it is a record of the Megatron host's training log."""
    return "iteration" in row and ("lm_loss" in row or "valid_loss" in row)


def is_timeline(row: Mapping[str, Any]) -> bool:
    """Whether it is a timeline of a step."""
    return "timeline" in row and "step" in row


def layer_record(row: Mapping[str, Any]) -> LayerRecord:
    """A record of one layer. `ValueError` where a field has not the type that it should have."""
    step, layer = int(_must(row, "step")), str(row["layer"])
    return LayerRecord(step=step, layer=layer, time=_maybe(row, "time"), load=tuple(
        _number(n, "load") for n in _list(row, "load")), tokens=_maybe(
            row, "tokens"), max_over_mean=_maybe(row, "max_over_mean"), drop_fraction=_maybe(
                row, "drop_fraction"), unused_experts=_maybe(row, "unused_experts"), entropy=_maybe(
                    row, "entropy"), losses=_numbers(row, "losses"), bytes_sent=_maybe(
                        row, "bytes_sent"), calls=_maybe(row,
                                                         "calls"), layouts=_numbers(row, "layouts"),
                       exchanges=_numbers(row, "exchanges"), gates=_numbers(row, "gates"),
                       decisions=tuple(_decision(step, layer, d) for d in _list(row, "decisions")))


def step_record(row: Mapping[str, Any]) -> tuple[StepRecord, list[LayerRecord]]:
    """(record of the training log, what it says of each layer). The latter have no loads: they
    stand in where there is no other record.
    """
    step = int(_must(row, "iteration"))
    record = StepRecord(step=step, loss=_maybe(row, "lm_loss"), valid_loss=_maybe(
        row, "valid_loss"), tokens_per_s=_maybe(row, "tokens_per_s"), learning_rate=_maybe(
            row, "lr"), grad_norm=_maybe(row, "grad_norm"), seconds=_maybe(row, "seconds"),
                        extra={name: value for name, value in _mean_losses(row).items()})
    layers = [
        LayerRecord(step=step, layer=str(name), max_over_mean=_maybe(b, "max_over_mean"),
                    drop_fraction=_maybe(b, "drop_fraction"), unused_experts=_maybe(
                        b, "unused_experts"), entropy=_maybe(b, "entropy"))
        for name, b in _dict(row, "balance").items() if isinstance(b, dict)
    ]
    return record, layers


def timeline(row: Mapping[str, Any]) -> tuple[int, int, list[Span]]:
    """(step, rank, spans)."""
    spans = [
        Span(str(track), str(name), _number(start, "timeline"), _number(end, "timeline"))
        for track, name, start, end in _list(row, "timeline")
    ]
    return int(_must(row, "step")), int(_maybe(row, "rank") or 0), spans


def settings(row: Mapping[str, Any]) -> dict[str, str]:
    """Settings that a host wrote down."""
    return {
        str(key).replace("_", "-"): str(value) for key, value in _dict(row, "settings").items()
        if value is not None
    }


def _mean_losses(row: Mapping[str, Any]) -> dict[str, float]:
    # Megatron's list has a 0 for every layer without experts
    found = {}
    for name, values in _dict(row, "aux_losses").items():
        present = [_number(v, name) for v in values if v] if isinstance(values, list) else []
        if present:
            found[f"loss {name}"] = sum(present) / len(present)
    return found


def _decision(step: int, layer: str, row: Any) -> Decision:
    if not isinstance(row, dict):
        raise ValueError(f"decision {row!r} is no object")
    call = _maybe(row, "call")
    return Decision(step=step, layer=layer, call=None if call is None else int(call), event=str(
        row.get("event", "")), choice=str(row.get("choice", "")), why=str(row.get("why", "")),
                    predicted_s=_maybe(row, "predicted_s"), measured_s=_maybe(row, "measured_s"))


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} is {value!r}, not a number")
    return value


def _maybe(row: Mapping[str, Any], name: str) -> float | None:
    return None if row.get(name) is None else _number(row[name], name)


def _must(row: Mapping[str, Any], name: str) -> float:
    value = _number(row.get(name), name)
    if not math.isfinite(value):
        raise ValueError(f"{name} is {value!r}, not a number of steps")
    return value


def _list(row: Mapping[str, Any], name: str) -> list[Any]:
    value = row.get(name) or []
    if not isinstance(value, list):
        raise ValueError(f"{name} is no list")
    return value


def _dict(row: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = row.get(name) or {}
    if not isinstance(value, dict):
        raise ValueError(f"{name} is no object")
    return value


def _numbers(row: Mapping[str, Any], name: str) -> dict[str, float]:
    return {
        str(key): _number(value, name) for key, value in _dict(row, name).items()
        if value is not None
    }
