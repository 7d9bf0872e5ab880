"""Settings of our layer that both hosts train and measure."""

from __future__ import annotations

from scripts.bench.train.host_sides import AUTO, FIXED, OURS, Settings

PIECES = "moe-plugin, pieces by load"
ONE_NODE = ("linear", "native", "r=0", "all_gather")


def our_settings(several_nodes: bool) -> dict[str, Settings]:
    """Return the settings of our layer by the name of the side.

    The sides are the default settings, `auto` for layout and all-to-all (on one node; on several
    nodes
    these are the defaults), and every fixed setting that is not the default.
    """
    if several_nodes:  # the default settings are `auto` already
        return {OURS: {}, **{f"{OURS}, {name}": FIXED[name] for name in FIXED}}
    auto = {"parallel.mode": "auto", "comm.all_to_all": "auto"}
    return {OURS: {}, AUTO: auto, **{f"{OURS}, {name}": FIXED[name] for name in ONE_NODE}}


def evaluated_settings(hardware: Settings) -> dict[str, Settings]:
    """Return the settings of our layer in evaluations, without and with pieces by load.

    Args:
        hardware: settings that describe the links and the processor, used by both sides.
    """
    return {OURS: hardware, PIECES: {**hardware, "parallel.prefill": True}}
