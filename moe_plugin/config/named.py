"""Layer settings given as keyword arguments. Each keyword is the name of the setting's flag, as in
`named_config(512, router="switch", top_k=1)`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from moe_plugin.config.flags import setting_specs
from moe_plugin.config.options import check
from moe_plugin.config.run import RunConfig
from moe_plugin.config.tree import MoEConfig, flatten, to_dict, with_overrides
from moe_plugin.utils.messages import did_you_mean, short, similar_names


def named_config(model_dim: int, **settings: Any) -> MoEConfig:
    """Build the settings of a layer from keyword arguments.

    Args:
        model_dim: width of a token (D).
        settings: setting values by flag name without `--moe-`, such as `top_k=1` or
            `all_to_all="linear"` (docs/config.md lists all names). A whole section can be given as
            a mapping, as in a YAML file: `router={"name": "switch", "top_k": 1}`.
    Raises:
        ValueError: If a setting does not exist, is given twice or has an invalid value. The message
            contains the invalid value, the bound and the remedy.
    """
    return with_overrides(MoEConfig(), {"model_dim": model_dim, **overrides(settings)})


def overrides(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the keyword arguments of `named_config` to setting values by dotted path."""
    flags = {spec.dest.removeprefix("moe_"): spec.path for spec in setting_specs()}
    top = [f.name for f in dataclasses.fields(MoEConfig)]
    # sections of a run are accepted here because `with_overrides` reports them more precisely
    known = {*top, *(f.name for f in dataclasses.fields(RunConfig))}
    given: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping) and name in known:
            paths = flatten({name: value})
        elif name in flags or name in known:
            paths = {flags.get(name, name): value}
        else:
            raise ValueError(
                f"unknown setting {short(name)}={short(value)}; {_meant(name, flags, top)}use a "
                "flag name from docs/config.md without --moe- (top_k, router, dispatch), or one "
                f"of {', '.join(top)}; the value of a section is a dict")
        if both := sorted(set(paths) & set(given)):
            raise ValueError(f"{both[0]} is given twice, the second time by {short(name)}; give "
                             "it only once")
        given |= paths
    return given


def _meant(name: str, flags: Mapping[str, str], top: list[str]) -> str:
    """For an unknown setting name, return a hint that lists the settings whose path ends with this
    name or, if there are none, settings with a similar spelling.
    """
    near = [flag for flag, path in flags.items() if path.rpartition(".")[2] == name]
    return did_you_mean(near[:3] or similar_names(name, [*top, *flags]))


def layer_config(config: MoEConfig | int, settings: Mapping[str, Any], **either: Any) -> MoEConfig:
    """Return the `MoEConfig` of a layer. The caller passes either an `MoEConfig`, or a token width
    and settings.

    Args:
        config: an `MoEConfig`, or the width of a token (D).
        settings: settings as in `named_config`. `settings` must be empty if `config` is an
            `MoEConfig`.
        either: constructor arguments that accept either a setting or another object. A string or
            mapping is used as a setting; other objects are ignored.
    Raises:
        ValueError: If a setting is invalid (see `named_config`), or if `config` is an `MoEConfig`
            and settings are also given.
    """
    given = {**settings, **{name: value for name, value in either.items()
                            if isinstance(value, str | Mapping)}}
    if not isinstance(config, MoEConfig):
        return named_config(config, **given)
    if given:
        name = next(iter(given))
        raise ValueError(f"{name}={short(given[name])} is given together with a whole MoEConfig. "
                         "Set it in the config, or pass the width of a token instead of the config")
    return config


def refuse_timeout(group: object | None, settings: Mapping[str, Any]) -> None:
    """Raise a `ValueError` if the user gives both a timeout and a process group, because a process
    group has its own timeout.
    """
    if group is not None and "timeout" in settings:
        raise ValueError(f"timeout={short(settings['timeout'])} cannot be used with a given "
                         "`comm`, which has its own timeout. Leave it out, or create the group "
                         "with TorchComm(group, timeout_s=...)")


# Settings of routers and experts that a layer itself reads, even with the user's own router or
# experts. hidden_dim is used to predict times.
_READ_BESIDE = frozenset({
    "router.top_k", "router.normalize", "router.batch_prioritized", "router.pre_gate",
    "router.predict", "router.fp32", "experts.hidden_dim", "experts.latent_dim",
    "experts.shared_hidden_dim", "experts.shared_gate", "experts.shared_overlap",
    "experts.weights_first", "experts.store"})
# Only the router itself implements these values, so they are refused although the layer reads
# `router.normalize`.
_BY_ROUTER = {("router.normalize", value) for value in ("before_drop", "always")}
# The layer's shared expert, if there is one, reads these settings of the experts.
_READ_BY_SHARED = frozenset({"experts.kind", "experts.activation", "experts.bias",
                             "experts.dropout", "experts.clamp", "experts.linear_offset"})


def refuse_beside(config: MoEConfig, *, router: bool, experts: bool) -> None:
    """Raise a `ValueError` for settings that have no effect because the user passes a router or
    expert modules.

    Args:
        router: whether the user passes a router module.
        experts: whether the user passes expert modules.
    """
    replaced = tuple(start for start, given in (("router.", router), ("experts.", experts))
                     if given)
    if not replaced:
        return
    check(not config.batch_invariant, "batch_invariant", True,
          f"False if you pass your own {replaced[0][:-1]}", "leave it out")
    values, defaults = flatten(to_dict(config)), flatten(to_dict(MoEConfig()))
    read = _READ_BESIDE | (_READ_BY_SHARED if config.experts.shared_hidden_dim else set())
    for path, value in values.items():
        unread = path not in read or (path, value) in _BY_ROUTER
        if path.startswith(replaced) and unread and value != defaults[path]:
            raise ValueError(f"{path}={short(value)} has no effect if you pass your own "
                             f"{path.split('.')[0]}: must be {defaults[path]}; leave it out, or "
                             "implement it in your own module")
