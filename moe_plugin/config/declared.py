"""The settings that registered routers declare to read."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from moe_plugin.utils.registry import KINDS


def router_class(name: str) -> Any:
    """Return the class or function registered as a router under `name`.

    A router class of this package declares which settings the router reads and to how many experts
    it sends a token (see `routing.RouterModule`). Users may also register functions.

    Returns:
        The registered object, or None if the name is unknown or no router is loaded yet. Settings
            are checked again when a layer is built.
    """
    registry = KINDS.get("router")
    return None if registry is None else registry.find(name)


def reads_of(name: str) -> frozenset[str] | None:
    """Return the names of the router settings that a router of this package reads.

    The result is None for unknown names and for a user's router, which may read any setting.
    """
    return getattr(router_class(name), "__dict__", {}).get("reads")


def fixed_k_of(name: str) -> int | None:
    """Return the number of experts per token of a router, or None if it is set by `top_k`."""
    return getattr(router_class(name), "fixed_k", None)


def built_in() -> dict[str, frozenset[str]]:
    """Return the settings that each router of this package reads, by the router's name."""
    routers = {entry.name: reads_of(entry.name) for entry in KINDS.get("router", ())}
    return {name: reads for name, reads in routers.items() if reads is not None}


def readers_of(setting: str, value: Any) -> Collection[str]:
    """Return the routers of this package that read a router setting if it has the given value.

    All routers of this package are returned if no router declares the setting.
    """
    declared = built_in()
    for key in (f"{setting}={value}", setting):
        readers = [name for name, reads in declared.items() if key in reads]
        if readers:
            return readers
    return declared


def may_be_read(names: Collection[str], readers: Collection[str]) -> bool:
    """Return whether any of the routers in `names` is one of `readers` or a user's own router."""
    return not set(names).isdisjoint(readers) or None in map(reads_of, names)


def router_remedy(readers: Collection[str]) -> str:
    """Return a remedy that names the routers in `readers`.

    The remedy names the most common router in `readers`. If none is common, it names the last one.
    """
    usual = [name for name in ("topk", "sigmoid_bias") if name in readers]
    first = next(iter([*usual, *reversed(list(readers))]), "topk")
    others = ", ".join(name for name in readers if name != first)
    return f"use router.name={first}" + (f" (or {others})" if others else "")
