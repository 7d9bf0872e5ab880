"""Audit targets for other frameworks. Each target is written the way a user of the framework would
write a training step.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata

from scripts.audit.contract import load
from scripts.audit.run import Audit, audit
from scripts.bench.peers.base import not_installed


@dataclass(frozen=True)
class Framework:
    """A framework for which there is an audit target.

    Attributes:
        where: the module and the class of the target, as `module:class`.
        package: the package whose version is printed with the result.
        needs: modules that must be importable. If one of these modules is missing, the framework is
            reported as not installed.
        imports: modules that are slow to import. These modules are imported once, before the ranks
            are forked.
    """

    where: str
    package: str
    needs: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()


_MEGATRON = ("megatron-core", ("megatron.core",), (
    "megatron.core.distributed", "megatron.core.optimizer",
    "megatron.core.models.gpt.gpt_layer_specs", "megatron.core.pipeline_parallel.schedules"))
_TRANSFORMERS = ("transformers", ("transformers",), (
    "transformers.models.mixtral.modeling_mixtral", "transformers.trainer",
    "transformers.distributed", "torch.distributed.fsdp", "torch.distributed.tensor"))
TARGETS = {
    "plain": Framework("scripts.audit.targets.plain:Plain", "moe-plugin"),
    "transformers": Framework(
        "scripts.audit.targets.transformers:Transformers", *_TRANSFORMERS),
    "transformers-all-reduce": Framework(
        "scripts.audit.targets.transformers:TransformersAllReduce", *_TRANSFORMERS),
    "transformers-moe-plugin": Framework(
        "scripts.audit.targets.transformers:TransformersOurs", *_TRANSFORMERS),
    "megatron": Framework("scripts.audit.targets.megatron:Megatron", *_MEGATRON),
    "megatron-allgather": Framework(
        "scripts.audit.targets.megatron:MegatronAllGather", *_MEGATRON),
    "megatron-per-token": Framework(
        "scripts.audit.targets.megatron:MegatronPerToken", *_MEGATRON),
    "deepspeed": Framework("scripts.audit.targets.deepspeed:DeepSpeed", "deepspeed",
                           ("deepspeed",), ("deepspeed.moe.layer",)),
}


def audit_named(name: str, ranks: Sequence[int], *, timeout_s: float, tolerance: float) -> Audit:
    """Audit a framework listed in `TARGETS`, or a file or module written by a user.

    Args:
        name: a name in `TARGETS`, or any target name that `load` accepts.
        ranks: the numbers of ranks to audit.
        timeout_s: time limit in seconds, both for building the model and for each step.
        tolerance: the maximum relative error at which a result is considered correct.

    Raises:
        ValueError: if the target does not exist (see `load`).
    """
    known = TARGETS.get(name)
    if known is None:
        return audit(load(name), ranks, timeout_s=timeout_s, tolerance=tolerance)
    if (why := not_installed(*known.needs)) is not None:
        return Audit(name, not_installed=why)
    for module in known.imports:
        importlib.import_module(module)
    try:
        version = f"{known.package} {metadata.version(known.package)}"
    except metadata.PackageNotFoundError:
        version = known.package
    target = dataclasses.replace(load(known.where), name=name)
    return audit(target, ranks, timeout_s=timeout_s, tolerance=tolerance, version=version)
