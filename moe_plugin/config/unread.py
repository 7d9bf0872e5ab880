"""Settings that a layer does not read: those of a whole model, on which a host acts, or functions
for loops of one's own; and those of routers and experts in whose place a layer got others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_plugin.config.flags import setting_specs
from moe_plugin.config.tree import MoEConfig, flatten, to_dict
from moe_plugin.messages import first_process, short, warn_once

# how their paths begin, and what acts on them outside of hosts
ELSEWHERE = {
    "offload.weights": "give it to moe_plugin.hosts.plain.streamed.streamed_trainer",
    "offload.": "call moe_plugin.memory.activations.auto.manage in your training loop",
    "pipeline.": "use Megatron, which has pipeline stages",
    "guard.twins": "use moe_plugin.resilience.twins.TwinCheck, or a host, fairseq or Megatron",
    "observe.": "give an ObserveConfig to moe_plugin.observe.recorder.StatsRecorder in your loop, "
                "or use a host, fairseq or Megatron",
    "guard.": "use moe_plugin.resilience.vote.VotedGradients, or a host, fairseq or Megatron",
}

# what a layer itself reads of the settings of routers and experts, whoever brings these; with
# hidden_dim times are predicted
_READ_BESIDE = frozenset({
    "router.top_k", "router.normalize", "router.batch_prioritized", "router.pre_gate",
    "router.predict", "router.fp32", "experts.hidden_dim", "experts.shared_hidden_dim",
    "experts.shared_gate", "experts.shared_overlap", "experts.weights_first", "experts.store"})
# and what its shared expert does, where it has one
_READ_BY_SHARED = frozenset({"experts.kind", "experts.activation", "experts.bias",
                             "experts.dropout"})


def of_whole_model(settings: Mapping[str, Any], elsewhere: Mapping[str, str] = ELSEWHERE
           ) -> dict[str, tuple[Any, str]]:
    """Settings of a whole model, by dotted path, that differ from their defaults: (default, what
    acts on it).

    elsewhere: the first of these beginnings of a path counts.
    """
    defaults, found = flatten(to_dict(MoEConfig())), {}
    for path, value in settings.items():
        if path not in defaults or value == defaults[path]:
            continue
        remedy = next((text for start, text in elsewhere.items() if path.startswith(start)), None)
        if remedy is not None:
            found[path] = defaults[path], remedy
    return found


def refuse(settings: Mapping[str, Any], what: str, elsewhere: Mapping[str, str] = ELSEWHERE, *,
           flags: bool = False) -> None:
    """`ValueError` for the first setting that `what` does not act on.

    flags: the setting was given as a flag.
    """
    names = {spec.path: spec.flag for spec in setting_specs()} if flags else {}
    for path, (default, remedy) in of_whole_model(settings, elsewhere).items():
        raise ValueError(f"{path}={short(settings[path])} does not fit {what}: must be "
                         f"{'none' if default is None else default}; leave "
                         f"{names.get(path, 'it')} out, or {remedy}")


def check(config: MoEConfig, speaks: bool, *, router: bool, experts: bool) -> None:
    """Of the settings of a layer that no host builds: see `warn` (if it `speaks`) and
    `refuse_beside`.
    """
    refuse_beside(config, router=router, experts=experts)
    if speaks and first_process():
        warn(config)


def warn(config: MoEConfig) -> None:
    """Warn of what a layer does not act on that is built from all settings, such as those of a file
    which hosts read, too; each text once.
    """
    settings = flatten(to_dict(config))
    for path, (_, remedy) in of_whole_model(settings).items():
        warn_once(__name__, f"{path}={short(settings[path])} has no effect in a layer by itself: "
                  f"leave it out, or {remedy}")


def refuse_beside(config: MoEConfig, *, router: bool, experts: bool) -> None:
    """`ValueError` for settings of a layer's router, or of its experts, where (True) a module, or
    modules, of the user's own take their place.
    """
    values, defaults = flatten(to_dict(config)), flatten(to_dict(MoEConfig()))
    read = _READ_BESIDE | (_READ_BY_SHARED if config.experts.shared_hidden_dim else set())
    own = tuple(start for start, given in (("router.", router), ("experts.", experts)) if given)
    for path, value in values.items():
        unread = path not in read or (path, value) == ("router.normalize", "before_drop")
        if path.startswith(own) and unread and value != defaults[path]:
            raise ValueError(f"{path}={short(value)} is not read where you bring the "
                             f"{path.split('.')[0]} yourself: must be {defaults[path]}; leave it "
                             "out, or build your own accordingly")
