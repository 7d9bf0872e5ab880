"""Settings by the names of their flags: `named_config(512, router="switch", top_k=1)`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from moe_plugin.config.flags import setting_specs
from moe_plugin.config.options import check
from moe_plugin.config.run import RunConfig
from moe_plugin.config.tree import MoEConfig, flatten, to_dict, with_overrides
from moe_plugin.utils.messages import alike, did_you_mean, short


def named_config(model_dim: int, **settings: Any) -> MoEConfig:
    """A config from keyword arguments.

    Args:
        model_dim: D, width of a token.
        settings: by the name of a setting's flag without `--moe-` (`top_k=1`, `router="switch"`,
            `all_to_all="linear"`; docs/config.md lists them), or a section as a mapping, as in a
            YAML file (`router={"name": "switch", "top_k": 1}`).
    Raises:
        ValueError: no such setting, the same one twice, or a value that does not fit; it names
            the value, the bound and the remedy.
    """
    return with_overrides(MoEConfig(), {"model_dim": model_dim, **overrides(settings)})


def overrides(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Such keyword arguments as dotted paths to values, for `with_overrides`."""
    flags = {spec.dest.removeprefix("moe_"): spec.path for spec in setting_specs()}
    top = [f.name for f in dataclasses.fields(MoEConfig)]
    known = {*top, *(f.name for f in dataclasses.fields(RunConfig))}  # whose error says more
    given: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping) and name in known:
            found = flatten({name: value})
        elif name in flags or name in known:
            found = {flags.get(name, name): value}
        else:
            raise ValueError(
                f"unknown setting {short(name)}={short(value)}; {_meant(name, flags, top)}use the "
                "name of a flag of docs/config.md without --moe- (top_k, router, dispatch), or one "
                f"of {', '.join(top)}, sections with a dict")
        if both := sorted(set(found) & set(given)):
            raise ValueError(f"{both[0]} is given twice, once by {short(name)}; give it once")
        given |= found
    return given


def _meant(name: str, flags: Mapping[str, str], top: list[str]) -> str:
    """Which settings a wrong name is near to: the same last part of the path, or similar letters.
    """
    near = [flag for flag, path in flags.items() if path.rpartition(".")[2] == name]
    return did_you_mean(near[:3] or alike(name, [*top, *flags]))


def layer_config(config: MoEConfig | int, settings: Mapping[str, Any], **either: Any) -> MoEConfig:
    """The config of a layer that takes a whole one, or a width and settings.

    Args:
        either: arguments that are a setting if they are text or a mapping, and something else if
            not.
    Raises:
        ValueError: see `named_config`; there are settings beside a whole config.
    """
    given = {**settings, **{name: value for name, value in either.items()
                            if isinstance(value, str | Mapping)}}
    if not isinstance(config, MoEConfig):
        return named_config(config, **given)
    if given:
        name = next(iter(given))
        raise ValueError(f"{name}={short(given[name])} beside a whole MoEConfig: give it in the "
                         "config, or give the width of a token in the config's place")
    return config


def refuse_timeout(group: object | None, settings: Mapping[str, Any]) -> None:
    """`ValueError` for a timeout beside a group that is given: it has one of its own."""
    if group is not None and "timeout" in settings:
        raise ValueError(f"timeout={short(settings['timeout'])} does not fit a `comm` that is "
                         "given, which has its own timeout: leave it out, or give it there, "
                         "TorchComm(group, timeout_s=...)")


# what a layer itself reads of the settings of routers and experts, whoever brings these; with
# hidden_dim times are predicted
_READ_BESIDE = frozenset({
    "router.top_k", "router.normalize", "router.batch_prioritized", "router.pre_gate",
    "router.predict", "router.fp32", "experts.hidden_dim", "experts.latent_dim",
    "experts.shared_hidden_dim", "experts.shared_gate", "experts.shared_overlap",
    "experts.weights_first", "experts.store"})
# and what its shared expert does, where it has one
_BY_ROUTER = {("router.normalize", value) for value in ("before_drop", "always")}
_READ_BY_SHARED = frozenset({"experts.kind", "experts.activation", "experts.bias",
                             "experts.dropout", "experts.clamp", "experts.linear_offset"})


def refuse_beside(config: MoEConfig, *, router: bool, experts: bool) -> None:
    """`ValueError` for settings of a layer's router, or of its experts, where (True) a module, or
    modules, of the user's own take their place.
    """
    own = tuple(start for start, given in (("router.", router), ("experts.", experts)) if given)
    if not own:
        return
    check(not config.batch_invariant, "batch_invariant", True,
          f"False where you bring the {own[0][:-1]} yourself", "leave it out")
    values, defaults = flatten(to_dict(config)), flatten(to_dict(MoEConfig()))
    read = _READ_BESIDE | (_READ_BY_SHARED if config.experts.shared_hidden_dim else set())
    for path, value in values.items():
        unread = path not in read or (path, value) in _BY_ROUTER
        if path.startswith(own) and unread and value != defaults[path]:
            raise ValueError(f"{path}={short(value)} is not read where you bring the "
                             f"{path.split('.')[0]} yourself: must be {defaults[path]}; leave it "
                             "out, or build your own accordingly")
