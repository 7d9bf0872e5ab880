"""The settings of a run: what a host, or your own training loop, does with a whole model."""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass, field

from moe_plugin.config.options import MOST_RANKS, MOST_SECONDS, MOST_STEPS, SettingsSection, option

# what reads them outside of fairseq and Megatron; the first beginning of a path counts
_PEERS = "give it to moe_plugin.training.resilience.averaging_peers.peer_of"
READERS = {
    "offload.weights": "give it to moe_plugin.hosts.plain.streamed.streamed_trainer",
    "offload.average": _PEERS,
    "offload.outer": _PEERS,
    "resize.": "call moe_plugin.checkpoint.resize.change_expert_parallel in your training loop, or "
               "use a host, fairseq or Megatron",
    "pipeline.": "use Megatron, which has pipeline stages",
    "swarm.": "use moe_plugin.training.resilience.swarm.Swarm and its peers, or Megatron",
    "": "give a RunConfig to moe_plugin.hosts.plain.run.TrainingSteps, or use a host, fairseq or "
        "Megatron",
}
_PROJECT = re.compile(r"([\w.-]+/)?[\w.-]{1,128}")
POLICIES = ("keep", "recompute", "swap")


@dataclass(kw_only=True)
class ObserveConfig(SettingsSection):
    """What a run writes: where the layers' statistics go besides the host's own log."""

    PATH = "observe."

    interval: int = option(100, "steps between two records", flag="stats-interval")
    jsonl: str | None = option(None, "file to which one JSON object per record is appended",
                               flag="stats-jsonl")
    tensorboard: str | None = option(None, "directory for TensorBoard event files",
                                     flag="stats-tensorboard")
    wandb: str | None = option(
        None,
        "PROJECT or ENTITY/PROJECT of Weights & Biases to which a run is added",
        flag="stats-wandb")
    timeline: int = option(
        0,
        "training step of which rank 0 writes a timeline to the JSONL file (slows that step "
        "down); 0: none",
        flag="stats-timeline")
    trace: str | None = option(
        None,
        "folder to which each rank's choices in training are written, in the form of Megatron's "
        "routing traces (`--moe-routing-trace-path`); a run that goes on from a checkpoint "
        "keeps the records of earlier steps",
        flag="stats-trace")
    trace_steps: int = option(0, "training steps that a run adds to the trace; 0: all",
                              flag="stats-trace-steps")
    replay: str | None = option(
        None,
        "folder of such a trace, whose choices layers take in training in place of their routers'",
        flag="stats-replay")
    take_over_folder: bool = option(
        False,
        "begin although another run seems to write to the same folder or JSONL file; for a run "
        "that is gone and whose host cannot be asked", flag="take-over-folder", prefix="--")

    @property
    def writes(self) -> bool:
        """Whether statistics go anywhere besides the host's own log, or choices come from a trace.
        """
        return bool(self.jsonl or self.tensorboard or self.wandb or self.trace or self.replay)

    def check_bounds(self) -> None:
        self.require("interval", self.interval >= 1, ">= 1", "use 100")
        self.require("timeline", self.timeline >= 0, ">= 0",
                     "use 0 for none, or the number of a step")
        self.require("wandb", self.wandb is None or _PROJECT.fullmatch(self.wandb) is not None,
                     "PROJECT or ENTITY/PROJECT", "use letters, digits and -_. in both, e.g. moe")
        self.require("trace_steps", self.trace_steps >= 0, ">= 0", "use 0 for all")
        self.read_where(self.trace is not None, "without observe.trace", "name its folder",
                        "trace_steps")
        self.require("replay", self.replay is None or self.replay != self.trace,
                     "another folder than observe.trace", "a trace cannot be read while it is "
                     "written: name another")
        self.require("timeline", not self.timeline or self.jsonl is not None,
                     "0 without observe.jsonl", "it is written there: name a file")


@dataclass(kw_only=True)
class GuardConfig(SettingsSection):
    """Checks between ranks, which hosts run; see docs/wrong_ranks.md."""

    PATH = "guard."

    twins: int = option(
        0,
        "> 0: every so many steps ranks that store the same experts compute one micro-batch alike, "
        "and one that gets other bits is named; 0: never",
        flag="check-twins")
    votes: int = option(
        0,
        "workers that compute each part of a batch; the gradient of most of them counts. A worker "
        "is a rank, an expert-parallel group or a pipeline. Odd; each rank computes so many times "
        "as much; 0: no votes",
        flag="votes")
    assignment: str = option(
        "cyclic",
        "with votes: which workers compute which parts (ByzShield). cyclic: any number of workers; "
        "mols, ramanujan, repetition: for 15, 25, 35, ... workers",
        choices=("cyclic", "mols", "ramanujan", "repetition"), flag="vote-assignment")
    aggregate: str = option(
        "mean",
        "with votes: what is done with the parts' gradients. mean: a run's own numbers; median: of "
        "each coordinate, which a few parts with wrong majorities do not move far",
        choices=("mean", "median"), flag="vote-aggregate")

    def check_bounds(self) -> None:
        self.within("twins", 0, MOST_STEPS, "use 0 for none, or 1000")
        self.within("votes", 0, MOST_RANKS, "use 0 for none, or 3")
        self.require("votes", self.votes == 0 or (self.votes >= 3 and self.votes % 2 == 1),
                     "0, or odd and >= 3", "an even number of answers has no majority: use 3")
        self.read_where(self.votes > 0, "where guard.votes=0", "use guard.votes=3", "assignment",
                        "aggregate")


@dataclass(kw_only=True)
class OffloadConfig(SettingsSection):
    """Memory for training, which hosts manage for a whole model; see docs/activations.md."""

    PATH = "offload."

    activations: str = option(
        "keep",
        "what each transformer layer does with its activations until backward. keep: on the "
        "device; recompute: only its input, the rest again in backward; swap: copied to host "
        "memory (on a CPU: to a disk) and back ahead of use; auto: one of these for each layer, "
        "chosen for offload.memory from what the first steps measure. Or keep, recompute or swap "
        "for each layer of the model, in the order of forward: recompute,keep,recompute,keep",
        flag="activations")
    memory: str | None = option(
        None,
        "with activations auto: what the layers' activations may take on a rank's device, such as "
        "8GiB", flag="activation-memory")
    path: str | None = option(
        None,
        "with swap, auto, weights host on a CPU: folder on a disk; none: that for temporary files",
        flag="activation-path")
    smallest: str = option(
        "64KiB", "with swap or auto: smaller tensors stay on the device",
        flag="activation-smallest")
    profile: str | None = option(
        None, "with activations auto: file for what was measured, which moe-plugin plan --memory "
        "explains", flag="activation-profile")
    weights: str = option(
        "device",
        "where the weights of the whole model lie, in plain PyTorch's streamed_trainer and in "
        "language models of both hosts. device: on it; host: in host memory (on a CPU: on a "
        "disk), from where they stream through the device block by block",
        choices=("device", "host"), flag="weights-on", prefix="--")
    weights_memory: str | None = option(
        None,
        "with weights host: what weights, gradients and inputs of blocks may take on the device, "
        "such as 8GiB; a host's model is cut into segments for it after the first step. none: a "
        "segment is one block", flag="weights-memory", prefix="--")
    average_every: int = option(
        0,
        "with weights host and a lighthouse (--moe-lighthouse): this run is a peer that trains "
        "alone, and averages its weights with those of the others after so many steps; 0: it "
        "trains alone", flag="average-every")
    outer_lr: float | None = option(
        None,
        "with average_every: learning rate of an outer optimizer (Nesterov) for which the peers' "
        "mean change is the gradient (DiLoCo), such as 0.7; none: weights become their mean",
        flag="outer-lr")
    outer_momentum: float = option(0.9, "with outer_lr: momentum of the outer optimizer",
                                   flag="outer-momentum")

    def check_bounds(self) -> None:
        auto = self.activations == "auto"
        self.require("activations", auto or set(self.each_layer()) <= set(POLICIES),
                     f"auto, one of {', '.join(POLICIES)}, or one of these for each layer",
                     "write for example keep, or recompute,keep,recompute,keep")
        self.require("memory", not auto or self.memory is not None,
                     "a size with offload.activations=auto", "name one, such as 8GiB")
        self.require("memory", auto or self.memory is None,
                     "none without offload.activations=auto", "use offload.activations=auto")
        self.require("profile", auto or self.profile is None,
                     "none without offload.activations=auto, which alone measures",
                     "use offload.activations=auto")
        self.require("weights_memory", self.weights == "host" or self.weights_memory is None,
                     "none without offload.weights=host", "use offload.weights=host")
        self.within("average_every", 0, MOST_STEPS, "use 0 for none, or 50")
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
        """`activations` at its commas: one name for all layers, or one for each."""
        return [name.strip() for name in self.activations.split(",")]


@dataclass(kw_only=True)
class PipelineConfig(SettingsSection):
    """The order of forward and backward passes over pipeline stages; see docs/pipeline.md."""

    PATH = "pipeline."
    SHORTHAND = "schedule"

    schedule: str = option(
        "1f1b",
        "what a stage computes when (Megatron). 1f1b: Megatron's own; eager-1f1b: more forward "
        "passes first, so that transfers between stages hide behind compute; terapipe: slices of a "
        "sequence flow through the stages; auto: the fastest of 1f1b, eager-1f1b "
        "and, with slices, terapipe that fits the memory, by measured times",
        choices=("1f1b", "eager-1f1b", "terapipe", "auto"), flag="pipeline-schedule", prefix="--")
    slices: str | None = option(
        None,
        "with terapipe: lengths of a sequence's slices, first to last, such as "
        "512,256,256, or how many equal ones; best, and none: the best by measured times. With "
        "auto: the same, and none: terapipe is not tried",
        flag="pipeline-slices", prefix="--")
    memory: str | None = option(
        None,
        "with auto: what the activations of all micro-batches may take on a rank, such as 8GiB; "
        "none: on a GPU what is free, on a CPU any",
        flag="pipeline-memory", prefix="--")

    delay_weights: bool = option(
        False, "with eager-1f1b: weights' gradients while the input's travels",
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
        """Whether a model's layers may get slices of sequences."""
        tries = self.schedule == "auto" and self.slices is not None
        return self.schedule == "terapipe" or tries


@dataclass(kw_only=True)
class SwarmConfig(SettingsSection):
    """Peers that come and go serve a model's stages (Megatron); see docs/swarm.md."""

    PATH = "swarm."
    SHORTHAND = "role"

    role: str = option(
        "none", "lead: the leading trainer; join: another trainer; peer: serves a stage",
        choices=("none", "lead", "join", "peer"), flag="swarm", prefix="--")
    address: str = option("127.0.0.1:29700", "host:port of the leading trainer",
                          flag="swarm-address", prefix="--")
    host: str = option("127.0.0.1", "with peer: this machine's address", flag="swarm-host",
                       prefix="--")
    stages: int = option(2, "stages of the model", flag="swarm-stages", prefix="--")
    peers: int = option(0, "with lead: peers to wait for; 0: one a stage", flag="swarm-peers",
                        prefix="--")
    wire: str = option("fp8", "with lead: how boundaries travel",
                       choices=("none", "bf16", "fp16", "fp8", "mxfp8"), flag="swarm-wire",
                       prefix="--")
    timeout_s: float = option(60.0, "seconds until a task goes to another peer",
                              flag="swarm-timeout", prefix="--")
    rebalance_s: float = option(60.0, "with lead: seconds between moves; 0: none",
                                flag="swarm-rebalance", prefix="--")
    secret: str | None = option(None, "file with a text that all must know", flag="swarm-secret",
                                prefix="--")

    def check_bounds(self) -> None:
        host, _, port = self.address.rpartition(":")
        self.require("address", bool(host) and port.isdecimal() and 0 < int(port) < 1 << 16,
                     "host:port", "write for example 10.0.0.1:29700")
        self.within("stages", 1, MOST_RANKS, "use 2")
        self.within("peers", 0, MOST_RANKS, "use 0 for one for each stage")
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
    """Changes of a run between two of its steps; see docs/replicas.md."""

    PATH = "resize."

    expert_parallel_at: dict[int, int] = field(default_factory=dict, metadata={
        "help": "expert-parallel ranks from a step on, by step: 100=4,200=2 (a file: "
                "{100: 4, 200: 2}). Before, the host's own setting counts; a run that resumes has "
                "the size of its step",
        "flag": "expert-parallel-at", "entry": "step=ranks"})

    def check_bounds(self) -> None:
        steps, path = list(self.expert_parallel_at), "expert_parallel_at"
        self.require(path, steps == sorted(steps), "steps in ascending order",
                     "write the first change first, e.g. 100=4,200=2")
        self.require(path, all(2 <= step <= MOST_STEPS for step in steps),
                     f"steps from 2 to {MOST_STEPS}",
                     "give the size of the first step by the host's own setting")
        self.require(path, all(1 <= size <= MOST_RANKS for size in
                               self.expert_parallel_at.values()),
                     f"1 to {MOST_RANKS} ranks", "use a divisor of the run's ranks")

    def size_at(self, step: int, before: int) -> int:
        """Expert-parallel ranks of a step, from 1. before: without any change."""
        return next((size for first, size in reversed(self.expert_parallel_at.items())
                     if first <= step), before)


@dataclass(kw_only=True)
class RunConfig(SettingsSection):
    """All settings of a run that no single layer reads."""

    observe: ObserveConfig = field(default_factory=ObserveConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    swarm: SwarmConfig = field(default_factory=SwarmConfig)
    resize: ResizeConfig = field(default_factory=ResizeConfig)

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
                             f"{value} beside resize.expert_parallel_at",
                             "its groups of ranks stay as they are: leave one of the two out")


def reader_of(path: str) -> str:
    """What to do with a run's setting, by its path, where there is no host."""
    return next(text for start, text in READERS.items() if f"{path}.".startswith(start))
