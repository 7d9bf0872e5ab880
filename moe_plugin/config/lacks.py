"""What a run of some host cannot have, and why: asked for, it is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moe_plugin.config.flags import setting_specs
from moe_plugin.config.run import RunConfig
from moe_plugin.config.tree import flatten, to_dict
from moe_plugin.utils.messages import short

HOSTS = {"fairseq": "fairseq", "megatron": "Megatron", "pytorch": "a training loop of your own",
         "vision": "the training of images"}
REPLICAS = "--moe-lighthouse"  # a flag of hosts, and no setting
# settings of a whole model that a host follows itself; all others are features around its steps
OF_HOSTS = "offload.weights", "pipeline.schedule", "swarm.role"


@dataclass(frozen=True)
class Lack:
    """Why a host does not have something, and what to do."""

    reason: str
    remedy: str


_STAGES = Lack("it has no pipeline stages", "train with moe_plugin.hosts.megatron.train")
_ON_DEVICE = Lack("its steps take weights that are on the device",
                  "train with moe_plugin.hosts.plain.streamed.streamed_trainer")
_IN_HOSTS = "use TrainingSteps in a training loop of your own, or a host, fairseq or Megatron"
_SPREAD = Lack("its experts are spread over all ranks, of which no two compute the same", _IN_HOSTS)
_ALL_RANKS = Lack("its experts are always spread over all ranks", _IN_HOSTS)
LACKS: Mapping[tuple[str, str], Lack] = {
    ("pipeline.schedule", "fairseq"): _STAGES,
    ("pipeline.schedule", "pytorch"): _STAGES,
    ("pipeline.schedule", "vision"): _STAGES,
    ("swarm.role", "fairseq"): _STAGES,
    ("swarm.role", "pytorch"): Lack("its model is in one process", "make a "
                                    "moe_plugin.training.resilience.swarm.Swarm and its peers"),
    ("swarm.role", "vision"): _STAGES,
    ("offload.weights", "pytorch"): _ON_DEVICE,
    ("offload.weights", "vision"): _ON_DEVICE,
    ("guard.twins", "vision"): _SPREAD,
    ("guard.votes", "vision"): _SPREAD,
    ("resize.expert_parallel_at", "pytorch"): Lack(
        "its model has groups of ranks that you made",
        "call moe_plugin.checkpoint.resize.change_expert_parallel between two steps"),
    ("resize.expert_parallel_at", "vision"): _ALL_RANKS,
    (REPLICAS, "vision"): Lack(
        "its epochs are passes over all images, which replicas do not share out", _IN_HOSTS),
}


def refuse_lacking(settings: RunConfig, host: str) -> None:
    """`ValueError` for a setting that a host (a key of `HOSTS`) lacks: it names both, the reason
    and the remedy.
    """
    defaults, given = (flatten(to_dict(each)) for each in (RunConfig(), settings))
    for (path, lacking), lack in LACKS.items():
        if lacking == host and given.get(path) != defaults.get(path):
            flag = next(spec.flag for spec in setting_specs() if spec.path == path)
            raise ValueError(
                f"{path}={short(given[path])} does not fit {HOSTS[host]}: must be "
                f"{defaults[path]}: {lack.reason}; leave {flag} out, or {lack.remedy}")
