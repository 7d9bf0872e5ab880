"""Find out which router settings each registered router reads."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from moe_plugin.utils.registry import KINDS


def router_class(name: str) -> Any:
    """Return the class or function registered as a router under `name`.

    A router class of this package declares which router settings it reads and how many experts it
    chooses for each token (see `routing.RouterModule`). Users may also register functions as
    routers.

    Returns: The registered object, or None if the name is unknown or no router has been imported
        yet. Router settings are checked again when a layer is built, after the routers have been
        imported.
    """
    registry = KINDS.get("router")
    return None if registry is None else registry.find(name)


def reads_of(name: str) -> frozenset[str] | None:
    """Return the names of the router settings that a built-in router reads.

    Returns None for unknown names and for routers registered by users, because these routers may
    read any setting.
    """
    return getattr(router_class(name), "__dict__", {}).get("reads")


def fixed_k_of(name: str) -> int | None:
    """Return the fixed number of experts per token of a router, or None if the router uses `top_k`.
    """
    return getattr(router_class(name), "fixed_k", None)


def built_in() -> dict[str, frozenset[str]]:
    """For each built-in router, return the names of the router settings that it reads."""
    routers = {entry.name: reads_of(entry.name) for entry in KINDS.get("router", ())}
    return {name: reads for name, reads in routers.items() if reads is not None}


def readers_of(setting: str, value: Any) -> Collection[str]:
    """Return the built-in routers that read a router setting, given the setting's value.

    If no router declares the setting, all built-in routers are returned.
    """
    declared = built_in()
    for key in (f"{setting}={value}", setting):
        readers = [name for name, reads in declared.items() if key in reads]
        if readers:
            return readers
    return declared


def may_be_read(names: Collection[str], readers: Collection[str]) -> bool:
    """Return whether a router in `names` may read a setting, given the built-in routers `readers`
    that read it. Routers registered by users may read any setting."""
    return not set(names).isdisjoint(readers) or None in map(reads_of, names)


def router_remedy(readers: Collection[str]) -> str:
    """Return advice for an error message: use one of the routers in `readers`.

    The most common router is suggested first. If `readers` contains neither `topk` nor
    `sigmoid_bias`, the last router in `readers` is suggested first.
    """
    usual = [name for name in ("topk", "sigmoid_bias") if name in readers]
    first = next(iter([*usual, *reversed(list(readers))]), "topk")
    others = ", ".join(name for name in readers if name != first)
    return f"use router.name={first}" + (f" (or {others})" if others else "")
