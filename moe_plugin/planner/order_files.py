"""The files of `planner.expert_order`: recorded choices (`observe.choices`), and orders of experts
by layer, both JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moe_plugin.messages import short
from moe_plugin.planner.expert_order import CoChoices, Order
from moe_plugin.regular_files import check_input, write_regular

CHOICES, ORDERS, VERSION = "choices of experts", "orders of experts", 1


def dump_choices(path: str | Path, layers: Mapping[str, CoChoices]) -> None:
    """Write what was recorded, by layer; pairs as the lower triangle."""
    _dump(path, CHOICES, {name: {
        "tokens": one.tokens, "groups": one.groups,
        "pairs": [list(row[:e + 1]) for e, row in enumerate(one.pairs_EE)],
        "sets": [list(chosen) for chosen in one.sets]} for name, one in layers.items()})


def load_choices(path: str | Path) -> dict[str, CoChoices]:
    """By layer; `ValueError` where the file cannot be read or holds something else."""
    layers = _load(path, CHOICES, "record it with observe.choices (--moe-stats-choices)")
    with _refused(path):
        return {name: _choices(each) for name, each in layers.items()}


def load_stages(paths: Sequence[str | Path]) -> dict[str, CoChoices]:
    """Of several files, such as one of each pipeline stage; `ValueError` as of `load_choices`, and
    where a layer is in two of them.
    """
    found: dict[str, CoChoices] = {}
    for path in paths:
        layers = load_choices(path)
        if twice := sorted(set(found) & set(layers)):
            raise ValueError(f"file {short(str(path))} has layer {short(twice[0])}, which another "
                             "file has, too: give one file of each pipeline stage")
        found |= layers
    return found


def dump_orders(path: str | Path, orders: Mapping[str, Sequence[int]]) -> None:
    """Write the expert at each position, by layer."""
    _dump(path, ORDERS, {name: list(order) for name, order in orders.items()})


def load_orders(path: str | Path) -> dict[str, Order]:
    """By layer; `ValueError` where the file cannot be read or holds something else."""
    layers = _load(path, ORDERS, "make it with moe-plugin plan --choices FILE --order FILE")
    with _refused(path):
        orders = {name: tuple(map(_whole, order)) for name, order in layers.items()}
        for name, order in orders.items():
            check_order(name, order, len(order))
    return orders


def check_order(name: str, order: Sequence[int], experts: int) -> None:
    """`ValueError` where a layer's order does not have each of its experts once."""
    if sorted(order) != list(range(experts)):
        raise ValueError(f"layer {short(name)}: order {short(list(order))} must have each of 0.."
                         f"{experts - 1} once; make it again from choices of this model")


@contextmanager
def _refused(path: str | Path) -> Iterator[None]:
    try:
        yield
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"file {short(str(path))} is damaged ({type(error).__name__}: "
                         f"{short(error)}); make it again") from error


def _choices(each: Mapping[str, Any]) -> CoChoices:
    lower = each["pairs"]
    pairs = [[_whole(lower[max(e, f)][min(e, f)]) for f in range(len(lower))]
             for e in range(len(lower))]
    return CoChoices(_whole(each["tokens"]), pairs,
                     [tuple(map(_whole, chosen)) for chosen in each["sets"]],
                     _whole(each["groups"]))


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"{value!r} is not a count")
    return value


def _dump(path: str | Path, kind: str, layers: Mapping[str, Any]) -> None:
    write_regular(Path(path), json.dumps(
        {"kind": kind, "version": VERSION, "layers": layers}, separators=(",", ":")) + "\n")


def _load(path: str | Path, kind: str, remedy: str) -> Mapping[str, Any]:
    check_input(Path(path))
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"file {short(str(path))} cannot be read ({short(error)}); "
                         f"{remedy}") from error
    fits = isinstance(found, dict) and found.get("kind") == kind and found.get(
        "version") == VERSION and isinstance(found.get("layers"), dict)
    if not fits:
        raise ValueError(f"file {short(str(path))} has no {kind} of version {VERSION}; {remedy}")
    layers: Mapping[str, Any] = found["layers"]
    return layers


def match_layers(given: Mapping[str, Any], prefixes: Sequence[str], what: str) -> dict[str, str]:
    """By the prefix of each MoE layer in a checkpoint, its name in a file.

    A name fits the one prefix that it begins. Where not all names do (Megatron's `layer3`), layers
    are matched in their order, if there are as many.

    what: the file, for errors.
    Raises: ValueError: names and layers do not match.
    """
    begun = {name: [p for p in prefixes if f"{p}.".startswith(f"{name}.") or p == ""]
             for name in given}
    if all(len(found) == 1 for found in begun.values()):
        found = {each[0]: name for name, each in begun.items()}
        if len(found) == len(given):
            return found
    if len(given) != len(prefixes):
        raise ValueError(f"{what} has layers {short(list(given))}, the checkpoint "
                         f"{short(list(prefixes))}: they must have the same names or be as many; "
                         "record the choices of this model")
    return dict(zip(sorted(prefixes, key=_natural), sorted(given, key=_natural), strict=True))


def _natural(name: str) -> list[tuple[bool, int, str]]:
    return [(not part.isdecimal(), int(part) if part.isdecimal() else 0, part)
            for part in re.split(r"(\d+)", name) if part]
