"""Run settings that some hosts do not support, and the error raised for such a setting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moe_plugin.config.flags import setting_specs
from moe_plugin.config.run import RunConfig
from moe_plugin.config.tree import flatten, to_dict
from moe_plugin.utils.messages import short

HOSTS = {"fairseq": "fairseq", "megatron": "Megatron", "pytorch": "a training loop of your own",
         "vision": "the training of images"}
REPLICAS = "--moe-lighthouse"  # a flag of the hosts, not a setting
# Settings of a whole model that a host implements itself. All other settings of a run are features
# that wrap the host's training steps.
OF_HOSTS = "offload.weights", "pipeline.schedule", "swarm.role"


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
