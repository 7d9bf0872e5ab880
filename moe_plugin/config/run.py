"""Settings of a training run (`RunConfig`), which a host or the user's own training loop applies to
a whole model.
"""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass, field

from moe_plugin.config.options import (
    MOST_RANKS,
    MOST_SECONDS,
    MOST_STEPS,
    MOST_WIDTH,
    SettingsSection,
    option,
)

# How to use each setting of a run without the hosts fairseq and Megatron. The first key that is a
# prefix of the setting's path applies.
_PEERS = "pass it to moe_plugin.training.resilience.averaging_peers.peer_of"
READERS = {
    "offload.weights": "pass it to moe_plugin.hosts.plain.streamed.streamed_trainer",
    "offload.average": _PEERS,
    "offload.outer": _PEERS,
    "finetune.": "call freeze_experts and add_lora of moe_plugin.hosts.plain.adapters, or use "
                 "Megatron",
    "resize.": "call moe_plugin.checkpoint.resize.change_expert_parallel in your training loop, or "
               "use a host, fairseq or Megatron",
    "pipeline.": "use Megatron, which has pipeline stages",
    "swarm.": "use moe_plugin.training.resilience.swarm.Swarm and its peers, or Megatron",
    "": "pass a RunConfig to moe_plugin.hosts.plain.run.TrainingSteps, or use a host, fairseq or "
        "Megatron",
}
_PROJECT = re.compile(r"([\w.-]+/)?[\w.-]{1,128}")
POLICIES = ("keep", "recompute", "swap")


@dataclass(kw_only=True)
class ObserveConfig(SettingsSection):
    """Where a run writes the statistics of its layers, in addition to the host's log."""

    PATH = "observe."

    interval: int = option(100, "steps between two records", flag="stats-interval")
    jsonl: str | None = option(None, "file to which one JSON object per record is appended",
                               flag="stats-jsonl")
    tensorboard: str | None = option(None, "directory for TensorBoard event files",
                                     flag="stats-tensorboard")
    wandb: str | None = option(None, "project of Weights & Biases that records the run, as PROJECT "
                               "or ENTITY/PROJECT", flag="stats-wandb")
    timeline: int = option(0, "training step for which rank 0 writes a timeline to the JSONL file "
                           "(this slows the step down); 0: no timeline", flag="stats-timeline")
    trace: str | None = option(None, "folder to which each rank writes the routers' choices in "
                               "training, in the format of Megatron's routing traces "
                               "(`--moe-routing-trace-path`). A run that resumes from a checkpoint "
                               "keeps the records of earlier steps", flag="stats-trace")
    trace_steps: int = option(0, "number of training steps that a run adds to the trace; 0: all "
                              "steps", flag="stats-trace-steps")
    replay: str | None = option(None, "folder of a routing trace whose choices replace the "
                                "routers' choices in training", flag="stats-replay")
    take_over_folder: bool = option(False, "start although another run seems to write to the same "
                                    "folder or JSONL file. Use it for a run that has ended and "
                                    "whose machine cannot be reached", flag="take-over-folder",
                                    prefix="--")

    @property
    def writes(self) -> bool:
        """True if statistics are also written elsewhere than to the host's log, or if routing
        choices are read from a trace.
        """
        return bool(self.jsonl or self.tensorboard or self.wandb or self.trace or self.replay)

    def check_bounds(self) -> None:
        self.require("interval", self.interval >= 1, ">= 1", "use 100")
        self.require("timeline", self.timeline >= 0, ">= 0",
                     "use 0 for no timeline, or the number of a step")
        self.require("wandb", self.wandb is None or _PROJECT.fullmatch(self.wandb) is not None,
                     "PROJECT or ENTITY/PROJECT", "use letters, digits and -_., e.g. moe")
        self.require("trace_steps", self.trace_steps >= 0, ">= 0", "use 0 for all steps")
        self.read_where(self.trace is not None, "without observe.trace", "set observe.trace",
                        "trace_steps")
        self.require("replay", self.replay is None or self.replay != self.trace,
                     "another folder than observe.trace", "a trace cannot be read while it is "
                     "being written; use another folder")
        self.require("timeline", not self.timeline or self.jsonl is not None,
                     "0 without observe.jsonl", "the timeline is written there; set observe.jsonl")


@dataclass(kw_only=True)
class GuardConfig(SettingsSection):
    """Checks that compare the results of different ranks. See docs/wrong_ranks.md."""

    PATH = "guard."

    twins: int = option(
        0, "number of steps between two checks. In a check, ranks that store the same experts "
        "compute the same micro-batch, and a rank whose bits differ is reported. 0: no checks",
        flag="check-twins")
    votes: int = option(0, "number of workers that compute each part of a batch; the gradient "
                        "computed by the majority is used. A worker is a rank, an expert-parallel "
                        "group or a pipeline. Must be odd; the compute per rank grows by this "
                        "factor. 0: no votes", flag="votes")
    assignment: str = option(
        "cyclic", "with votes: rule that assigns parts to workers (ByzShield). cyclic: any number "
        "of workers; mols, ramanujan, repetition: for 15, 25, 35, ... workers",
        choices=("cyclic", "mols", "ramanujan", "repetition"), flag="vote-assignment")
    aggregate: str = option("mean", "with votes: how the parts' gradients are combined. mean: same "
                            "results as the run without votes; median: of each coordinate, so that "
                            "a few parts with wrong majorities have little effect",
                            choices=("mean", "median"), flag="vote-aggregate")

    def check_bounds(self) -> None:
        self.within("twins", 0, MOST_STEPS, "use 0 for no checks, or 1000")
        self.within("votes", 0, MOST_RANKS, "use 0 for no votes, or 3")
        self.require("votes", self.votes == 0 or (self.votes >= 3 and self.votes % 2 == 1),
                     "0, or odd and >= 3", "an even number of answers has no majority: use 3")
        self.read_where(self.votes > 0, "where guard.votes=0", "use guard.votes=3", "assignment",
                        "aggregate")


@dataclass(kw_only=True)
class OffloadConfig(SettingsSection):
    """Methods that reduce the device memory needed to train a model. See docs/activations.md."""

    PATH = "offload."

    activations: str = option(
        "keep", "how each transformer layer stores its activations until backward. keep: on the "
        "device; recompute: only the layer's input, and the rest is recomputed in backward; swap: "
        "copied to host memory (on a CPU: to disk) and back before use; auto: one of these for "
        "each layer, chosen to fit offload.memory from measurements in the first steps. A list "
        "gives the choice for each layer of the model, in the order of forward: "
        "recompute,keep,recompute,keep", flag="activations")
    memory: str | None = option(None, "with activations=auto: device memory for the layers' "
                                "activations on each rank, such as 8GiB", flag="activation-memory")
    path: str | None = option(None, "with swap, auto or weights=host on a CPU: folder on a disk. "
                              "Default (none): the folder for temporary files",
                              flag="activation-path")
    smallest: str = option("64KiB", "with swap or auto: tensors smaller than this stay on the "
                           "device", flag="activation-smallest")
    profile: str | None = option(None, "with activations=auto: file for the measurements, which "
                                 "moe-plugin plan --memory explains", flag="activation-profile")
    weights: str = option("device", "where the weights of the whole model are stored, in plain "
                          "PyTorch's streamed_trainer and in language models of both hosts. "
                          "device: on the device; host: in host memory (on a CPU: on disk), from "
                          "which they stream through the device block by block",
                          choices=("device", "host"), flag="weights-on", prefix="--")
    weights_memory: str | None = option(
        None, "with weights=host: device memory for the weights, gradients and inputs of blocks, "
        "such as 8GiB. A host splits its model into segments that fit this size after the first "
        "step. Default (none): a segment is one block", flag="weights-memory", prefix="--")
    average_every: int = option(0, "with weights=host and a lighthouse (--moe-lighthouse): this "
                                "run is a peer that trains alone, and averages its weights with "
                                "the other peers' weights after this many steps; 0: no averaging",
                                flag="average-every")
    outer_lr: float | None = option(None, "with average_every: learning rate, such as 0.7, of an "
                                    "outer optimizer (Nesterov) whose gradient is the peers' mean "
                                    "change of weights (DiLoCo). Default (none): the weights are "
                                    "set to their mean", flag="outer-lr")
    outer_momentum: float = option(0.9, "with outer_lr: momentum of the outer optimizer",
                                   flag="outer-momentum")

    def check_bounds(self) -> None:
        auto = self.activations == "auto"
        self.require("activations", auto or set(self.each_layer()) <= set(POLICIES),
                     f"auto, one of {', '.join(POLICIES)}, or one of these for each layer",
                     "write for example keep, or recompute,keep,recompute,keep")
        self.require("memory", not auto or self.memory is not None,
                     "a size with offload.activations=auto", "set a size such as 8GiB")
        self.require("memory", auto or self.memory is None,
                     "none without offload.activations=auto", "use offload.activations=auto")
        self.require("profile", auto or self.profile is None,
                     "none without offload.activations=auto, because nothing else measures",
                     "use offload.activations=auto")
        self.require("weights_memory", self.weights == "host" or self.weights_memory is None,
                     "none without offload.weights=host", "use offload.weights=host")
        self.within("average_every", 0, MOST_STEPS, "use 0 for no averaging, or 50")
        self.require("average_every", self.weights == "host" or not self.average_every,
                     "0 without offload.weights=host", "use offload.weights=host")
        self.require("outer_lr", self.outer_lr is None or 0 < self.outer_lr < float("inf"),
                     "none, or > 0 and finite", "use 0.7")
        self.require("outer_momentum", 0 <= self.outer_momentum < 1, "in [0, 1)", "use 0.9")
        self.read_where(self.average_every > 0, "where offload.average_every=0",
                        "use offload.average_every=50", "outer_lr")
        self.read_where(self.outer_lr is not None, "without offload.outer_lr",
                        "use offload.outer_lr=0.7", "outer_momentum")
        where = f"where offload.activations={self.activations}"
        swaps = auto or "swap" in self.each_layer()
        self.read_where(swaps, where, "use swap or auto", "smallest")
        self.read_where(swaps or self.weights == "host", f"{where} and offload.weights=device",
                        "use swap, auto or offload.weights=host", "path")

    def each_layer(self) -> list[str]:
        """Return the policies in `activations`, a comma-separated string that contains one policy
        for all layers or one policy per layer.
        """
        return [name.strip() for name in self.activations.split(",")]


@dataclass(kw_only=True)
class PipelineConfig(SettingsSection):
    """Order of forward and backward passes in pipeline parallelism. See docs/pipeline.md."""

    PATH = "pipeline."
    SHORTHAND = "schedule"

    schedule: str = option("1f1b", "order in which a stage computes its passes (Megatron). 1f1b: "
                           "Megatron's own schedule; eager-1f1b: more forward passes first, so "
                           "that transfers between stages overlap with computation; terapipe: "
                           "slices of a sequence flow through the stages; auto: the fastest of "
                           "1f1b, eager-1f1b and, with slices, terapipe that fits in memory, by "
                           "measured times", choices=("1f1b", "eager-1f1b", "terapipe", "auto"),
                           flag="pipeline-schedule", prefix="--")
    slices: str | None = option(None, "with terapipe: lengths of a sequence's slices, first to "
                                "last, such as 512,256,256, or the number of equal slices; best, "
                                "or none: the fastest lengths by measured times. With auto: the "
                                "same, but none means that terapipe is not tried",
                                flag="pipeline-slices", prefix="--")
    memory: str | None = option(None, "with auto: memory for the activations of all micro-batches "
                                "on each rank, such as 8GiB. Default (none): the free memory on a "
                                "GPU, no limit on a CPU", flag="pipeline-memory", prefix="--")

    delay_weights: bool = option(False, "with eager-1f1b: compute the gradients of weights while "
                                 "the gradient of the input is being sent",
                                 flag="pipeline-delay-weights", prefix="--")

    def check_bounds(self) -> None:
        self.require("delay_weights", not self.delay_weights or self.schedule == "eager-1f1b",
                     "off without pipeline.schedule=eager-1f1b", "use pipeline.schedule=eager-1f1b")
        self.require("memory", self.memory is None or self.schedule == "auto",
                     "none without pipeline.schedule=auto", "use pipeline.schedule=auto")
        self.require("slices", self.slices is None or self.cuts,
                     "none without pipeline.schedule=terapipe or auto",
                     "use pipeline.schedule=terapipe")

    @property
    def cuts(self) -> bool:
        """True if a layer may receive a slice of a sequence rather than a whole sequence."""
        tries = self.schedule == "auto" and self.slices is not None
        return self.schedule == "terapipe" or tries


@dataclass(kw_only=True)
class SwarmConfig(SettingsSection):
    """Training with peers that each compute a pipeline stage (Megatron). See docs/swarm.md."""

    PATH = "swarm."
    SHORTHAND = "role"

    role: str = option("none", "role of this process. lead: the leading trainer; join: another "
                       "trainer; peer: a process that computes a stage; none: no swarm",
                       choices=("none", "lead", "join", "peer"), flag="swarm", prefix="--")
    address: str = option("127.0.0.1:29700", "host:port of the leading trainer",
                          flag="swarm-address", prefix="--")
    host: str = option("127.0.0.1", "with peer: address of this machine", flag="swarm-host",
                       prefix="--")
    stages: int = option(2, "number of stages of the model", flag="swarm-stages", prefix="--")
    peers: int = option(0, "with lead: number of peers to wait for; 0: one per stage",
                        flag="swarm-peers", prefix="--")
    wire: str = option("fp8", "with lead: dtype in which stage inputs, outputs and their gradients "
                       "are sent", choices=("none", "bf16", "fp16", "fp8", "mxfp8"),
                       flag="swarm-wire", prefix="--")
    timeout_s: float = option(60.0, "seconds until a task is sent to another peer",
                              flag="swarm-timeout", prefix="--")
    rebalance_s: float = option(60.0, "with lead: seconds between moves of peers to other stages; "
                                "0: peers do not move", flag="swarm-rebalance", prefix="--")
    secret: str | None = option(None, "file with a shared secret, the same for all processes of "
                                "the swarm", flag="swarm-secret", prefix="--")

    def check_bounds(self) -> None:
        host, _, port = self.address.rpartition(":")
        self.require("address", bool(host) and port.isdecimal() and 0 < int(port) < 1 << 16,
                     "host:port", "write for example 10.0.0.1:29700")
        self.within("stages", 1, MOST_RANKS, "use 2")
        self.within("peers", 0, MOST_RANKS, "use 0 for one peer per stage")
        self.within("timeout_s", 1e-3, MOST_SECONDS, "use 60")
        self.within("rebalance_s", 0, MOST_SECONDS, "use 60, or 0 for never")
        self.read_where(self.role != "none", "where swarm.role=none", "use swarm.role=lead",
                        "address", "stages", "timeout_s", "secret")
        self.read_where(self.role == "lead", f"where swarm.role={self.role}",
                        "use swarm.role=lead", "peers", "wire", "rebalance_s")
        self.read_where(self.role == "peer", f"where swarm.role={self.role}",
                        "use swarm.role=peer", "host")


@dataclass(kw_only=True)
class ResizeConfig(SettingsSection):
    """Changes to the expert-parallel size of a run between training steps. See docs/replicas.md."""

    PATH = "resize."

    expert_parallel_at: dict[int, int] = field(default_factory=dict, metadata={
        "help": "changes of the number of expert-parallel ranks, by the step from which they "
                "apply: 100=4,200=2 (in a file {100: 4, 200: 2}). Earlier steps use the host's own "
                "setting. A resumed run uses the number of its current step",
        "flag": "expert-parallel-at", "entry": "step=ranks"})

    def check_bounds(self) -> None:
        steps, path = list(self.expert_parallel_at), "expert_parallel_at"
        self.require(path, steps == sorted(steps), "steps in ascending order",
                     "write the first change first, e.g. 100=4,200=2")
        self.require(path, all(2 <= step <= MOST_STEPS for step in steps),
                     f"steps from 2 to {MOST_STEPS}",
                     "set the size of the first step with the host's own setting")
        self.require(path, all(1 <= size <= MOST_RANKS for size in
                               self.expert_parallel_at.values()),
                     f"1 to {MOST_RANKS} ranks", "use a divisor of the run's ranks")

    def size_at(self, step: int, before: int) -> int:
        """Return the expert-parallel size that is used in a training step.

        Args:
            step: index of the training step, counted from 1.
            before: the expert-parallel size before the first change.
        """
        return next((size for first, size in reversed(self.expert_parallel_at.items())
                     if first <= step), before)


@dataclass(kw_only=True)
class FinetuneConfig(SettingsSection):
    """Frozen experts and adapters on them (Megatron). See docs/frozen.md."""

    PATH = "finetune."

    frozen_experts: str = option(
        "none", "number format in which the experts' weights are stored and frozen. Weights of "
        "full precision are rounded when a checkpoint is loaded. none: the weights are not rounded",
        choices=("none", "nf4", "nf4_double", "mxfp4", "fp8", "int8"), flag="frozen-experts")
    lora_rank: int = option(0, "rank of the low-rank adapters (LoRA) on all experts, whose weights "
                            "are then frozen; 0: no adapters", flag="expert-lora-rank")
    lora_alpha: float = option(16.0, "with lora_rank: the adapters are multiplied by lora_alpha / "
                               "lora_rank", flag="expert-lora-alpha")

    def check_bounds(self) -> None:
        self.within("lora_rank", 0, MOST_WIDTH, "use 0 for no adapters, or 8")
        self.require("lora_alpha", 0 < self.lora_alpha < float("inf"), "> 0 and finite", "use 16")
        self.read_where(self.lora_rank > 0, "where finetune.lora_rank=0",
                        "use finetune.lora_rank=8", "lora_alpha")

    @property
    def freezes(self) -> bool:
        """True if the weights of the experts are frozen."""
        return self.frozen_experts != "none" or self.lora_rank > 0


@dataclass(kw_only=True)
class RunConfig(SettingsSection):
    """Settings of a training run, which apply to a whole model rather than to a single layer."""

    observe: ObserveConfig = field(default_factory=ObserveConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    swarm: SwarmConfig = field(default_factory=SwarmConfig)
    resize: ResizeConfig = field(default_factory=ResizeConfig)
    finetune: FinetuneConfig = field(default_factory=FinetuneConfig)

    def check_bounds(self) -> None:
        cuts = self.pipeline.cuts
        self.require("offload.activations", not cuts or self.offload.activations == "keep",
                     f"keep where pipeline.schedule={self.pipeline.schedule} cuts sequences",
                     "use Megatron's --recompute-granularity with slices of sequences, or "
                     "pipeline.schedule=1f1b")
        if self.resize.expert_parallel_at:
            for name, value in (("guard.votes", 0), ("guard.twins", 0),
                                ("offload.weights", "device"), ("pipeline.schedule", "1f1b")):
                self.require(name, operator.attrgetter(name)(self) == value,
                             f"{value} together with resize.expert_parallel_at",
                             "its groups of ranks cannot change; leave one of the two out")


def reader_of(path: str) -> str:
    """Return a sentence that explains how to use a run setting without the fairseq or Megatron
    host.
    """
    return next(text for start, text in READERS.items() if f"{path}.".startswith(start))
