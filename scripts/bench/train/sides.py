"""The sides of our layer that both hosts train: their settings."""

from __future__ import annotations

from scripts.bench.train.host_sides import AUTO, FIXED, OURS, Settings

PIECES = "moe-plugin, pieces by load"
ONE_NODE = ("linear", "native", "r=0", "all_gather")


def our_settings(several_nodes: bool) -> dict[str, Settings]:
    """The sides of our layer by name: defaults; `auto` for everything on one node, and every fixed
    setting that is not the default.
    """
    if several_nodes:  # there the defaults are auto
        return {OURS: {}, **{f"{OURS}, {name}": FIXED[name] for name in FIXED}}
    auto = {"parallel.mode": "auto", "comm.all_to_all": "auto"}
    return {OURS: {}, AUTO: auto, **{f"{OURS}, {name}": FIXED[name] for name in ONE_NODE}}


def evaluated_settings(hardware: Settings) -> dict[str, Settings]:
    """The sides of our layer in evaluation: without and with pieces by load, both with what is
    known of links and processors.
    """
    return {OURS: hardware, PIECES: {**hardware, "parallel.prefill": True}}
