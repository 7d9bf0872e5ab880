"""The list of all features that a run can have. All host frameworks use this list.

To add a feature, add a row to `FEATURES` with the setting that enables it, and a function that
creates it from `HostSeams`. If a host framework does not support a feature,
`moe_plugin.config.refusals` contains the feature and the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from torch import nn

from moe_plugin.comm import Comm
from moe_plugin.config import GuardConfig, OffloadConfig, RunConfig
from moe_plugin.config.refusals import HOSTS, REPLICAS, refuse_lacking
from moe_plugin.memory.activations.offload import Activations
from moe_plugin.memory.weights.streamed import StreamedTrainer
from moe_plugin.observe.features import DropWarning, FirstStepLine, LayerRecords, listen
from moe_plugin.output import LayerStats
from moe_plugin.routing.contract import RouterSteps
from moe_plugin.training.resilience.averaging_peers import PeerSteps
from moe_plugin.training.resilience.elastic import ReplicaPlace, ReplicaSteps
from moe_plugin.training.resilience.resizing import ExpertParallelSteps
from moe_plugin.training.resilience.skipped_steps import FiniteSteps, RowsFit, StepStart
from moe_plugin.training.resilience.step_votes import StepVotes
from moe_plugin.training.resilience.stopping import RUN, Stopping
from moe_plugin.training.resilience.twins import TwinCheck
from moe_plugin.training.run import Run
from moe_plugin.utils.run_feature import RunFeature

Made = TypeVar("Made", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class HostSeams:
    """Information about a run that only the host framework has.

    Attributes:
        host: key of the host framework in `config.refusals.HOSTS`.
        models: the parts of the model on this rank, without wrappers.
        world: group of all ranks that share the models.
        data: data-parallel ranks. Defaults to `world`.
        layers: the MoE layers, keyed by the names that are used in records; see
            `observe.features.listen`.
        records: group of ranks whose statistics are combined, or None if this rank has no layers.
        rank: rank of this process in timelines and traces. Defaults to this rank's index in
            `records`.
        has_log: see `LayerRecords`.
        training: optional. Function that is also called with the statistics of training passes.
        speaks: whether this rank logs warnings about dropped choices.
        start: see `TwinCheck`.
        kept: see `TwinCheck`.
        skips_steps: whether the loss scaler of the host framework skips steps with non-finite
            gradients.
        streamed: trainer for streamed weights, which updates a model block by block. `streamed` is
            None if weights are not streamed.
        replicas: position of this run among several replicas, or None if there is only one replica.
        resize: function that creates the feature for `resize` settings. None if the host framework
            does not support this feature.
        activations: function that creates the feature for `offload.activations`. None if the host
            framework does not support this feature.
        votes: function that creates the feature for `guard.votes`. None if the host framework does
            not support this feature.
        more: additional features of this run. These features are called before `FiniteSteps` checks
            whether gradients are finite, so they may change gradients.
    """

    host: str
    models: Sequence[nn.Module]
    world: Comm
    data: Comm | None = None
    layers: Mapping[str, Any] = field(default_factory=dict)
    records: Comm | None = None
    rank: int | None = None
    has_log: bool = True
    training: Callable[[str, LayerStats], None] | None = None
    speaks: bool = True
    start: Callable[[list[nn.Module]], StepStart] = StepStart
    kept: Callable[[], AbstractContextManager[Any]] = nullcontext
    skips_steps: bool = False
    streamed: StreamedTrainer | None = None
    replicas: ReplicaPlace | None = None
    resize: Callable[[RunConfig], RunFeature | None] | None = None
    activations: Callable[[OffloadConfig], Activations | None] | None = None
    votes: Callable[[GuardConfig], StepVotes] | None = None
    more: Sequence[RunFeature] = ()


class FeatureRow(NamedTuple):
    """A row in the list of features.

    Attributes:
        setting: name of the setting or section of settings that enables the feature. An empty
            string means that every run has the feature.
        kinds: classes that the created feature can have.
        make: function that creates the feature from the settings and the host framework's
            information, or returns None if the feature is disabled. Collective.
    """

    setting: str
    kinds: tuple[type[RunFeature], ...]
    make: Callable[[RunConfig, HostSeams], RunFeature | None]


def _twins(settings: RunConfig, host: HostSeams) -> TwinCheck | None:
    every = settings.guard.twins
    return TwinCheck(host.models[0], host.data or host.world, every=every, start=host.start,
                     kept=host.kept) if every else None


def _replicas(settings: RunConfig, host: HostSeams) -> RunFeature | None:
    if host.replicas is None:
        return None
    if host.streamed is not None:
        return PeerSteps(settings.offload, host.streamed, host.replicas)
    return ReplicaSteps(host.replicas)


def _records(settings: RunConfig, host: HostSeams) -> LayerRecords | None:
    if host.records is None or not settings.observe.writes:
        return None
    # the report names the library that trains the model
    is_theirs = host.host == "pytorch" and any(map(_is_of_transformers, host.models))
    return LayerRecords(settings.observe, host.layers, host.records,
                        host="transformers" if is_theirs else host.host, rank=host.rank,
                        has_log=host.has_log)


def _is_of_transformers(model: nn.Module) -> bool:
    return any(kind.__module__ == "transformers.modeling_utils" for kind in type(model).__mro__)


def _votes(settings: RunConfig, host: HostSeams) -> StepVotes | None:
    guard = settings.guard
    return _told(host, host.votes, "guard.votes")(guard) if guard.votes else None


def _activations(settings: RunConfig, host: HostSeams) -> Activations | None:
    offload = settings.offload
    return None if offload.activations == "keep" else _told(
        host, host.activations, "offload.activations")(offload)


def _told(host: HostSeams, seam: Made | None, setting: str) -> Made:
    if seam is None:
        raise ValueError(f"{setting} is not supported in this run of {HOSTS[host.host]}, "
                         "because no function that implements it was passed: leave it out")
    return seam


def _resize(settings: RunConfig, host: HostSeams) -> RunFeature | None:
    return _told(host, host.resize, "resize.expert_parallel_at")(
        settings) if settings.resize.expert_parallel_at else None


# in the order in which features are created, and called in each step
FEATURES = (
    FeatureRow("resize.expert_parallel_at", (ExpertParallelSteps,), _resize),
    FeatureRow("", (FirstStepLine,), lambda settings, host: FirstStepLine()),
    FeatureRow("", (Stopping,), lambda settings, host: RUN),
    FeatureRow("guard.twins", (TwinCheck,), _twins),
    FeatureRow(REPLICAS, (ReplicaSteps, PeerSteps), _replicas),
    FeatureRow("observe.jsonl", (LayerRecords,), _records),
    FeatureRow("guard.votes", (StepVotes,), _votes),
    FeatureRow("", (RowsFit,), lambda settings, host: RowsFit(host.models, host.world, host.start)),
    FeatureRow("", (FiniteSteps,), lambda settings, host: None if host.skips_steps else
               FiniteSteps()),
    FeatureRow("", (RouterSteps,), lambda settings, host: RouterSteps(
        host.models) if host.streamed is None else None),
    FeatureRow("offload.activations", (Activations,), _activations),
    FeatureRow("", (DropWarning,), lambda settings, host: DropWarning(host.speaks)),
)


def make_run(settings: RunConfig, host: HostSeams) -> Run:
    """Create the run of a host framework, with the features that the settings enable. Collective.

    Raises:
        ValueError: If the host framework does not support a feature, or if a feature's settings are
            not valid.
    """
    refuse_lacking(settings, host.host)
    made: list[RunFeature | None] = []
    for row in FEATURES:
        made.append(row.make(settings, host))
        made += host.more if row.setting == REPLICAS else ()
    run = Run(made)
    records, drops = run.find(LayerRecords), run.find(DropWarning)
    if (rows := run.find(RowsFit)) is not None:
        rows.votes = run.find(StepVotes)
    takers = [take for take in (host.training, records and records.recorder.add) if take]
    listen(host.layers, takers, None if drops is None else drops.validation.add)
    if records is not None:
        if (activations := run.find(Activations)) is not None:
            records.recorder.watch("activations", activations.swapper.copier,
                                   activations.on_device)
        if host.streamed is not None:
            records.recorder.watch("weights", host.streamed.copier, host.streamed.on_device)
    return run
