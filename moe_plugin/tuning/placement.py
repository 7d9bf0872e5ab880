"""Placement of a layer's experts and tokens on the ranks of a prepared group.

If several ranks have the same tokens, these tokens are divided among the ranks according to one of
Parm's schedules.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

import moe_plugin
from moe_plugin.comm.agreement import agree
from moe_plugin.comm.base import Comm
from moe_plugin.comm.placement import HostContext, Placement
from moe_plugin.config import MoEConfig
from moe_plugin.config.options import resolved
from moe_plugin.config.tree import flatten, to_dict
from moe_plugin.dispatch import check_settings, dispatchers
from moe_plugin.experts.base import check_memory
from moe_plugin.planner.events import ParmShape, choose_run, run_s
from moe_plugin.planner.units import show_time
from moe_plugin.tuning.collectives import with_collectives
from moe_plugin.tuning.default_hardware import default_cluster
from moe_plugin.tuning.prepare_group import (
    DEFAULT_WHEN_UNSET,
    exchange_name,
    log_once,
    prepare,
    spans_nodes,
)

log = logging.getLogger(__name__)
# settings that may differ between ranks, because nothing that ranks exchange depends on them
OWN_SETTINGS = ("observe.", "comm.timeout_s", "comm.watchdog_s")
# settings that may name a file
FILES = ("comm.cluster", "comm.network", "comm.topology", "tuner.device")
REFERENCE_TOKENS = 4096  # tokens per rank for the choice of a schedule if the host states none


def agree_on_settings(config: MoEConfig, comm: Comm, agreed: Mapping[str, Any],
                      **more: Any) -> None:
    """Check that all ranks create the same layer and use the same versions.

    All ranks must call this function; see `agree`. If a setting specifies a file, the contents of
    the file are also compared, because each node may have a different file.

    Args:
        config: settings of the layer.
        comm: the group.
        agreed: settings of the host framework; see `HostContext`.
        more: additional values, by name, that determine the shapes and dtypes of exchanged data.

    Raises:
        ValueError: If the ranks have different values. This error is raised on all ranks and names
            the differences.
    """
    settings = {name: value for name, value in {**flatten(to_dict(config)), **agreed}.items()
                if not name.startswith(OWN_SETTINGS)}
    files = {f"contents of {name}": _digest(settings[name]) for name in FILES}
    agree(comm, {**settings, **files, **more, "version of torch": torch.__version__,
                 "version of moe_plugin": moe_plugin.__version__})


def _digest(name: str | None) -> str | None:
    """Return a hash of the contents of a file, or None if the file does not exist."""
    if not name or not os.path.isfile(name):
        return None
    try:
        with open(name, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()[:16]
    except OSError as error:
        return str(error)


def place_experts(config: MoEConfig, comm: Comm, router: nn.Module | None = None,
                  experts: Callable[[int], nn.Module] | None = None, *,
                  dtype: torch.dtype | None = None, device: Any = None,
                  host: HostContext = HostContext()) -> tuple[MoEConfig, Placement, Comm | None]:
    """Return the settings, the placement, and the group of ranks that divide the same tokens among
    themselves. All ranks must call this function.

    The group is None if tokens are not divided before routing; see `with_schedule`. First, the
    settings of all ranks are compared (`agree_on_settings`). Finally, this function checks that the
    weights fit into memory.

    Args:
        config: settings of the layer.
        comm: the group.
        router, experts, dtype, device, host: arguments of the layer; see `MoELayer`.

    Raises:
        ValueError: If the settings do not match the group, if ranks have different settings, or if
            the memory is too small.
    """
    agree_on_settings(config, comm, host.agreed, dtype=dtype or torch.get_default_dtype(),
                      custom_router=router is not None, custom_experts=experts is not None)
    config.prepare()
    exchange = prepare(comm, config.comm, may_measure(config))
    comm = with_collectives(comm, config.comm, may_measure(config) and not config.deterministic)
    place = Placement(comm, config.num_experts, exchange, configured_shards=config.parallel.shards)
    place.check()
    config, place, sharing = with_schedule(config, place, host.tokens, dtype)
    check_settings(config.dispatch, host.training)
    check_memory(config, place, experts, dtype, device)
    return resolve_open_settings(config, comm), place, sharing


def may_measure(config: MoEConfig) -> bool:
    """Return true if measurements during training may determine settings that the user has not set.

    Return False for bounded rows, because the host must not wait for the device in this case.
    """
    return not dispatchers.get(config.dispatch.name).traits.bounded


def resolve_open_settings(config: MoEConfig, comm: Comm) -> MoEConfig:
    """Choose values for all settings that the user has not set, for a prepared group. Return the
    settings.

    On several nodes, where these choices matter most, the all-to-all algorithm and the layout are
    chosen by measurements during training. On one node, the layout is predicted once, so that runs
    are bitwise reproducible. The layout is fixed if it is specified by the settings, if results
    must not depend on measured times, or if the dispatcher has only one layout. See also
    `may_measure`.
    """
    parallel, traits = config.parallel, dispatchers.get(config.dispatch.name).traits
    named = (parallel.r is not None or parallel.d > 1 or parallel.d_backward > 0
             or parallel.spill not in (None, "never"))
    free = comm.size > 1 and comm.separate and not (
        named or config.deterministic or config.batch_invariant or traits.single_layout)
    measures = may_measure(config)
    mode = parallel.mode or (
        DEFAULT_WHEN_UNSET["parallel.mode"][measures and spans_nodes(comm)] if free else "fixed")
    if mode == "auto" and parallel.mode is None:
        log_once(comm, "layouts", f"layouts of layers over {comm.name} are chosen while training, "
                 "because it spans nodes (`--moe-parallel fixed` keeps one layout)")
    return resolved(config, parallel=resolved(parallel, mode=mode), comm=resolved(
        config.comm, all_to_all=exchange_name(comm, config.comm, measures)))


def with_schedule(config: MoEConfig, place: Placement, tokens: int | None = None,
                  dtype: torch.dtype | None = None) -> tuple[MoEConfig, Placement, Comm | None]:
    """Return the settings and the placement for `parallel.replicas`, and the group that divides the
    same tokens among its ranks in schedule S1.

    The group is None if tokens are not divided before routing. No tokens are divided with a single
    replica, with schedule S2 (`Placement.replicas` contains its ranks), and with dispatchers that
    require the same tokens on all ranks.

    Args:
        config: settings of the layer.
        place: placement of the layer's experts on the ranks.
        tokens: number of tokens per call and rank, which must be the same on all ranks. By default,
            a typical number is assumed.
        dtype: dtype of the rows. Defaults to torch's default dtype.

    Raises:
        ValueError: If the number of ranks, the dispatcher and the schedule cannot be combined.
    """
    size = config.parallel.replicas
    if size == 1 or dispatchers.get(config.dispatch.name).traits.shares_tokens:
        return config, place, None
    schedule = _schedule(config, place, tokens or REFERENCE_TOKENS, dtype)
    if place.comm.size % size:
        nearest = max(d for d in range(1, size + 1) if place.comm.size % d == 0)
        raise ValueError(f"parallel.replicas={size} does not divide {place.comm.size} "
                         f"expert-parallel ranks. Use a divisor; the nearest is {nearest}")
    replicas = place.comm.contiguous_subgroup(size)
    if schedule == "s1":
        return config, place, replicas
    config = resolved(config, dispatch=resolved(config.dispatch, name="parm_s2"))
    return config, dataclasses.replace(place, replicas=replicas), None


def _schedule(config: MoEConfig, place: Placement, tokens: int,
              dtype: torch.dtype | None) -> str:
    asked, dispatch = config.parallel.schedule, config.dispatch
    traits = dispatchers.get(dispatch.name).traits
    slots = dispatch.capacity_factor is not None and traits.fixed_slots
    if asked == "s2" and not slots:
        factor = dispatch.capacity_factor
        raise ValueError(
            f"parallel.schedule='s2' divides slots, but dispatch.name={dispatch.name!r} with "
            f"capacity_factor={'none' if factor is None else factor} has no slots. "
            "Use dispatch.name='padded' with a capacity factor, or parallel.schedule='s1'")
    if asked != "auto" or not slots:
        return "s2" if asked == "s2" or traits.splits_slots else "s1"
    assert dispatch.capacity_factor is not None
    factor = config.router.experts_per_token * (abs(dispatch.capacity_factor) or 1.0)
    shape = ParmShape(tokens=tokens, model_dim=config.model_dim,
                      rows_factor=factor * config.row_dim / config.model_dim,
                      element_bytes=(dtype or torch.get_default_dtype()).itemsize,
                      replicas=config.parallel.replicas, shards=place.shards)
    cluster, pieces = default_cluster(place.comm, place.comm.device), config.parallel.d
    chosen = choose_run(shape, cluster, pieces)
    log.info("schedule of %d ranks with the same tokens: %s (predicted exchanges for %d tokens: "
             "s1 %s, s2 %s)", config.parallel.replicas, chosen, tokens,
             *(show_time(run_s(shape, cluster, name, pieces)) for name in ("s1", "s2")))
    return chosen
