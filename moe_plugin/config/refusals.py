"""Tables of settings that a host does not support, or cannot combine with another setting.

`LACKS` lists the run settings that some hosts do not support. In addition, each host has a table of
combinations, `hosts/NAME/refusals.py`. Three programs use these tables: a host raises errors from
them when it builds a run, `moe-plugin doctor --all` prints them, and docs/refusals_HOST.md is
generated from the hosts' tables.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from moe_plugin.config.flags import setting_specs
from moe_plugin.config.run import RunConfig
from moe_plugin.config.tree import flatten, to_dict
from moe_plugin.utils.messages import short

# all hosts refuse these for the same reason
ACTIVATION_POLICY = "offload.activations={offload.activations!r}"
CONTROLLED_TWICE = "both control the same tensors or layers; remove one of them"
_PLACEHOLDER = re.compile(r"\{([\w.]+)(!r)?\}")
_SHOWN_VALUE = re.compile(r"[= ]?(\([^()]*\{[^()]*\)|\{[\w.!]+\})")


class Values(dict[str, Any]):
    """Setting values by name. Values that are not in `known` are looked up with `read(name)`.

    Args:
        read: function that returns the value of a setting, or None if the setting does not exist.
    """

    def __init__(self, known: Mapping[str, Any],
                 read: Callable[[str], Any] = lambda name: None) -> None:
        super().__init__(known)
        self._read = read

    def __missing__(self, name: str) -> Any:
        return self._read(name)

    def fill(self, text: str) -> str:
        """Replace `{name}` in a text with the value of the setting `name`, and `{name!r}` with the
        value's `repr`.
        """
        return _PLACEHOLDER.sub(lambda found: (short if found[2] else str)(self[found[1]]), text)


@dataclass(frozen=True)
class Refusal:
    """One setting that cannot be combined with a requested setting.

    Attributes:
        setting: the setting, as written in error messages. Setting names in braces are replaced
            with their values (see `Values.fill`).
        excluded: function that returns a true value if the given setting values contain the
            excluded setting.
        remedy: what the user can do instead, and the reason if it is not obvious. `remedy` may also
            contain setting names in braces.
        example: setting values that, together with the request's example, trigger this error.
    """

    setting: str
    excluded: Callable[[Values], Any]
    remedy: str
    example: Mapping[str, Any]

    @property
    def title(self) -> str:
        """The excluded setting without its value, as written in lists of settings."""
        return _SHOWN_VALUE.sub("", self.setting).strip()


@dataclass(frozen=True)
class Request:
    """A setting or flag, and the settings with which it cannot be combined.

    Attributes:
        name: the requested setting or flag, as written in error messages. Setting names in braces
            are replaced with their values, as in `Refusal.setting`.
        rows: the settings that cannot be combined with the request, in the order in which they are
            checked.
        example: setting values in which the requested setting is used.
        message: template of the error message, with the placeholders `request`, `setting` and
            `remedy`.
    """

    name: str
    rows: tuple[Refusal, ...]
    example: Mapping[str, Any] = field(default_factory=dict)
    message: str = "{request} does not fit {setting}: {remedy}"

    def text(self, row: Refusal, values: Values) -> str:
        """Return the error message for a setting that cannot be combined with the request."""
        parts = {"request": self.name, "setting": row.setting, "remedy": row.remedy}
        return values.fill(_PLACEHOLDER.sub(lambda part: parts.get(part[1], part[0]), self.message))

    @property
    def title(self) -> str:
        """The request without explanations, as written in lists of requests."""
        return Values(self.example).fill(self.name).partition(", w")[0]

    def refuse(self, values: Mapping[str, Any]) -> None:
        """Raise a `ValueError` for the first setting in `values` that cannot be combined with the
        request."""
        known = values if isinstance(values, Values) else Values(values)
        for row in self.rows:
            if row.excluded(known):
                raise ValueError(self.text(row, known))


def flag(name: str) -> str:
    """Return the command-line flag of an argument. An argument in a group is written as
    `group.name`.
    """
    return "--" + name.rpartition(".")[2].replace("_", "-")


def _named(text: str, name: str) -> str:
    return text.replace("{flag}", flag(name)).replace("{}", name)


def off(remedy: str, *names: str, shown: str = "{flag}", given: Any = True) -> tuple[Refusal, ...]:
    """Return a `Refusal` for each setting that must not be set.

    Args:
        remedy: remedy for all these settings. `{flag}` is replaced with the flag of the setting,
            and `{}` with the name of the setting.
        names: names of the settings.
        shown: name of the setting in error messages. `shown` may contain the same placeholders as
            `remedy`.
        given: value to use for each setting in the examples.
    """
    return tuple(Refusal(_named(shown, name), operator.itemgetter(name), _named(remedy, name),
                         {name: given}) for name in names)


def at_most_one(remedy: str, *names: str, shown: str = "{flag}") -> tuple[Refusal, ...]:
    """Return a `Refusal` for each size that must be 1, 0 or not set. See `off` for the arguments.
    """
    def several(name: str, values: Values) -> bool:
        return (values[name] or 1) > 1

    return tuple(Refusal(_named(shown, name), functools.partial(several, name),
                         _named(remedy, name), {name: 2}) for name in names)


def one_of(remedy: str, name: str, *accepted: Any, shown: str, given: Any) -> tuple[Refusal, ...]:
    """Return a `Refusal` for a setting that may only have one of the accepted values or not be set.
    See `off`.
    """
    return (Refusal(_named(shown, name), lambda values: values[name] not in (None, *accepted),
                    _named(remedy, name), {name: given}),)


def when(setting: str, excluded: Callable[[Values], Any], remedy: str,
         **example: Any) -> tuple[Refusal, ...]:
    """Return a `Refusal` with an arbitrary condition. In the keyword arguments of the example, `__`
    stands for a dot.
    """
    return (Refusal(setting, excluded, remedy,
                    {name.replace("__", "."): value for name, value in example.items()}),)


def streamed_peer(lighthouse: str) -> tuple[Refusal, ...]:
    """Return a `Refusal` for each of the two settings of an averaging peer that is given without
    the other. Such a peer streams its weights and averages them with the weights of other runs.

    lighthouse: the host's name for the setting that contains the address of the lighthouse.
    """
    every = "offload.average_every"
    return (Refusal("--moe-lighthouse without --moe-average-every",
                    lambda values: values[lighthouse] and not values[every],
                    "peers average weights, not gradients: set it, e.g. to 50",
                    {lighthouse: "http://a:1"}),
            Refusal(f"--moe-average-every {{{every}}} without --moe-lighthouse",
                    lambda values: values[every] and not values[lighthouse],
                    "set the address of the lighthouse", {every: 5}))


HOSTS = {"fairseq": "fairseq", "megatron": "Megatron", "pytorch": "a training loop of your own",
         "vision": "the training of images"}
REPLICAS = "--moe-lighthouse"  # a flag of the hosts, not a setting
# Settings of a whole model that a host implements itself. All other settings of a run are features
# that wrap the host's training steps.
OF_HOSTS = ("offload.weights", "pipeline.schedule", "swarm.role", "finetune.frozen_experts",
            "finetune.lora_rank")


@dataclass(frozen=True)
class Lack:
    """The reason why a host does not support a setting, and what to use instead."""

    reason: str
    remedy: str


_STAGES = Lack("it has no pipeline stages", "train with moe_plugin.hosts.megatron.train")
_ON_DEVICE = Lack("its training steps need all weights on the device",
                  "train with moe_plugin.hosts.plain.streamed.streamed_trainer")
_IN_HOSTS = "use TrainingSteps in a training loop of your own, or a host, fairseq or Megatron"
_SPREAD = Lack("its experts are spread over all ranks, so no two ranks compute the same "
               "results", _IN_HOSTS)
_ALL_RANKS = Lack("its experts are always spread over all ranks", _IN_HOSTS)
_AFTER_LOADING = Lack("it does not convert experts when it loads a checkpoint",
                      "call freeze_experts and add_lora of moe_plugin.hosts.plain.adapters on a "
                      "loaded model, or train with moe_plugin.hosts.megatron.train")
LACKS: Mapping[tuple[str, str], Lack] = {
    ("pipeline.schedule", "fairseq"): _STAGES,
    ("pipeline.schedule", "pytorch"): _STAGES,
    ("pipeline.schedule", "vision"): _STAGES,
    ("swarm.role", "fairseq"): _STAGES,
    ("swarm.role", "pytorch"): Lack("its model is in one process",
                                    "create a "
                                    "moe_plugin.training.resilience.swarm.Swarm and its peers"),
    ("swarm.role", "vision"): _STAGES,
    ("offload.weights", "pytorch"): _ON_DEVICE,
    ("offload.weights", "vision"): _ON_DEVICE,
    ("guard.twins", "vision"): _SPREAD,
    ("guard.votes", "vision"): _SPREAD,
    ("resize.expert_parallel_at", "pytorch"): Lack(
        "you created the groups of ranks of its model",
        "call moe_plugin.checkpoint.resize.change_expert_parallel between two steps"),
    ("resize.expert_parallel_at", "vision"): _ALL_RANKS,
    **{(f"finetune.{name}", host): _AFTER_LOADING for name in ("frozen_experts", "lora_rank")
       for host in ("fairseq", "pytorch", "vision")},
    (REPLICAS, "vision"): Lack(
        "each epoch is a pass over all images, which replicas do not divide among themselves",
        _IN_HOSTS),
}


def refuse_lacking(settings: RunConfig, host: str) -> None:
    """Raise a `ValueError` if a run uses a setting that its host does not support.

    Args:
        host: a key of `HOSTS`.
    """
    defaults, given = (flatten(to_dict(config)) for config in (RunConfig(), settings))
    for (path, lacking), lack in LACKS.items():
        if lacking == host and given.get(path) != defaults.get(path):
            flag = next(spec.flag for spec in setting_specs() if spec.path == path)
            raise ValueError(
                f"{path}={short(given[path])} is not supported in {HOSTS[host]}, because "
                f"{lack.reason}. The value must be {defaults[path]}; leave {flag} out, or "
                f"{lack.remedy}")
