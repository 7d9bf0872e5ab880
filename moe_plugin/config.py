"""The one tree of settings. Defaults live here and nowhere else; host flags are generated from it (`moe_plugin.flags`).

Each leaf field carries `help`, and may carry `choices` (a fixed set) or `flag` (the host flag's name after `--moe-`).
Names that come from a registry (router, dispatcher, all-to-all, expert compute) are checked against that registry
when the layer is built, because users may register their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from omegaconf import OmegaConf

from moe_plugin.options import build, check_leaves, hints_of, option
from moe_plugin.options import check as _check
from moe_plugin.router_config import RouterConfig
from moe_plugin.yaml_file import read_yaml


@dataclass(kw_only=True)
class DispatchConfig:
    """How tokens become expert rows, and how many rows an expert takes."""

    name: str = option("ragged", "dispatcher: ragged (exact rows) or padded (fixed slots), by registered name", flag="dispatch")
    capacity_factor: float | None = option(
        None, "none: dropless. f > 0: k*int(f*ceil(T/E)) slots an expert and source rank; 0: the largest load (never "
        "drops); f < 0: the largest load, at most k*int(-f*ceil(T/E))", flag="capacity-factor")
    eval_capacity_factor: float | None = option(
        None, "capacity factor when not training; none: the training one", flag="eval-capacity-factor")
    eval_token_fraction: float = option(
        0.0, "> 0: when not training, capacity is ceil(fraction * T) whatever the factor", flag="eval-token-fraction")
    equal_tokens: bool = option(
        False, "promise that every rank always has the same number of tokens: saves one small all-reduce a layer "
        "and counts padding as tokens in the capacity", flag="equal-tokens")

    def __post_init__(self) -> None:
        check_leaves(self, "dispatch.")
        _check(0 <= self.eval_token_fraction <= 1, "dispatch.eval_token_fraction", self.eval_token_fraction,
               "in [0, 1]", "use 0 to take the capacity factor")


@dataclass(kw_only=True)
class ExpertsConfig:
    """What an expert is and how the experts of a rank are computed."""

    kind: str = option("ffn", "expert: ffn (two linear maps) or gated_ffn (SwiGLU-like), by registered name", flag="expert-kind")
    hidden_dim: int = option(0, "inner width of an expert; 0: four times model_dim", flag="expert-hidden-dim")
    activation: str = option("gelu", "activation", choices=("gelu", "gelu_tanh", "relu", "silu", "squared_relu"), flag="expert-activation")
    bias: bool = option(True, "biases in the experts' linear maps", flag="expert-bias")
    compute: str = option("auto", "how a rank's experts are computed, by registered name; auto chooses", flag="expert-compute")
    compute_choice: str = option("measured", "by what compute=auto chooses: measured (the ways in question are timed once for a load, and the result "
                                 "kept), or rule (nothing is timed)", choices=("measured", "rule"), flag="expert-compute-choice")
    shared_hidden_dim: int = option(0, "inner width of an expert that every token visits; 0: none", flag="shared-expert-hidden-dim")
    init_std: float | None = option(None, "standard deviation of initial weights; none: Xavier uniform", flag="expert-init-std")

    def __post_init__(self) -> None:
        check_leaves(self, "experts.")
        for name in ("hidden_dim", "shared_hidden_dim"):
            _check(getattr(self, name) >= 0, f"experts.{name}", getattr(self, name), ">= 0", "use 0 for the default")
        _check(self.init_std is None or self.init_std > 0, "experts.init_std", self.init_std, "> 0 or none", "use none")


@dataclass(kw_only=True)
class CommConfig:
    """How ranks exchange rows."""

    all_to_all: str = option("linear", "all-to-all algorithm, by registered name: linear, 2dh, leader, native; auto measures and chooses", flag="all-to-all")
    topology: str = option(
        "detect", "which ranks share a node: detect (launcher and host names), a number of ranks a node, or a YAML file with nodes: [[0, 1], ...]",
        flag="topology")
    cluster: str | None = option(None, "cluster file of `moe-plugin calibrate`, by which auto chooses; none: auto measures", flag="cluster")
    wire: str = option("none", "dtype of rows between ranks, where it is smaller than theirs: bf16, fp16 or fp8 (error bounds: docs/all_to_all.md)",
                       choices=("none", "bf16", "fp16", "fp8"), flag="wire")
    watchdog_s: float = option(0.0, "> 0: seconds between signs of life, so that the error of a failed exchange names who is missing", flag="watchdog")
    timeout_s: float = option(1800.0, "seconds after which a collective that waits for a peer ends in an error", flag="timeout")

    def __post_init__(self) -> None:
        check_leaves(self, "comm.")
        _check(self.watchdog_s >= 0, "comm.watchdog_s", self.watchdog_s, ">= 0", "use 0 for no watchdog")
        _check(self.timeout_s > 0, "comm.timeout_s", self.timeout_s, "> 0", "use 1800")


@dataclass(kw_only=True)
class ParallelConfig:
    """In which layout a layer runs, and whether it finds out by itself. `parallel: auto` is short for `parallel: {mode: auto}`."""

    SHORTHAND: ClassVar[str] = "mode"

    mode: str = option("fixed", "fixed: the layout named here; auto: measured and chosen while training runs, for the load of the moment",
                       choices=("fixed", "auto"), flag="parallel")
    r: int | None = option(
        None, "0: gather all experts' parameters, no all-to-all; r >= 1 (a divisor of the ranks that an expert is cut over): each token goes to r ranks; "
        "none: as many as an expert is cut into", flag="parallel-r")
    shards: int | None = option(
        None, "ranks over which every expert is cut along its inner width (Megatron's expert-tensor parallelism), a divisor of the expert-parallel "
        "ranks; none: as few as the experts leave, ranks/experts and at least 1", flag="expert-shards")
    d: int = option(1, "pieces in which rows travel and are computed, so that both overlap; 1: no overlap", flag="overlap")
    d_backward: int = option(0, "the same for backward; 0: as forward", flag="overlap-backward")
    replicas: int = option(1, "consecutive expert-parallel ranks that hold the same tokens (tensor parallelism without sequence parallelism)",
                           flag="replicas")
    schedule: str = option("auto", "with replicas: s1 splits tokens before the gate, s2 the slots after it (needs a capacity); auto: by the "
                           "cost model", choices=("auto", "s1", "s2"), flag="replicas-schedule")
    shadow: int = option(0, "most hot experts at a time whose weights are sent to all ranks instead of their tokens (FasterMoE); 0: none",
                         flag="shadow")
    max_d: int = option(4, "auto: the most pieces tried (1, 2, 4, ... up to it)", flag="overlap-max")
    tries: int = option(4, "auto: layouts timed for a load not seen before, the best predicted first", flag="parallel-tries")
    samples: int = option(2, "auto: timed calls a layout", flag="parallel-samples")
    drift: float = option(0.3, "auto: relative change of a layer's time after which it is tuned again", flag="parallel-drift")
    bucket: float = option(1.5, "auto: loads within this factor of each other share a choice", flag="parallel-bucket")
    device: str | None = option(None, "auto: device file for the cost model (see configs/devices); none: guessed", flag="parallel-device")

    def __post_init__(self) -> None:
        check_leaves(self, "parallel.")
        for name, least in (("d", 1), ("d_backward", 0), ("max_d", 1), ("tries", 1), ("samples", 1), ("replicas", 1), ("shadow", 0)):
            _check(getattr(self, name) >= least, f"parallel.{name}", getattr(self, name), f">= {least}", f"use {max(1, least)}")
        _check(self.r is None or self.r >= 0, "parallel.r", self.r, ">= 0 or none", "use none")
        _check(self.shards is None or self.shards >= 1, "parallel.shards", self.shards, ">= 1 or none", "use none")
        _check(self.drift > 0, "parallel.drift", self.drift, "> 0", "use 0.3")
        _check(self.bucket > 1, "parallel.bucket", self.bucket, "> 1", "use 1.5")


@dataclass(kw_only=True)
class ObserveConfig:
    """Where the layers' statistics go besides the host's own log."""

    interval: int = option(100, "steps between two records", flag="stats-interval")
    jsonl: str | None = option(None, "file to which one JSON object a record is appended", flag="stats-jsonl")
    tensorboard: str | None = option(None, "directory for TensorBoard event files", flag="stats-tensorboard")
    timeline: int = option(0, "training step of which rank 0 writes a timeline to the JSONL file (slows that step down); 0: none", flag="stats-timeline")

    def __post_init__(self) -> None:
        check_leaves(self, "observe.")
        _check(self.interval >= 1, "observe.interval", self.interval, ">= 1", "use 100")
        _check(self.timeline >= 0, "observe.timeline", self.timeline, ">= 0", "use 0 for none, or the number of a step")
        _check(not self.timeline or self.jsonl is not None, "observe.timeline", self.timeline, "0 without observe.jsonl",
               "it is written there: name a file")


@dataclass(kw_only=True)
class MoEConfig:
    """Everything one MoE layer needs to know. Hosts fill `model_dim`; users set the rest by flag, YAML or code."""

    model_dim: int = option(0, "width of a token; the host fills it in")
    num_experts: int = option(8, "experts in the whole expert-parallel group", flag="num-experts")
    imports: str | None = option(
        None, "your own modules, imported before names are looked up, so that they can register routers, losses, ...: dotted names or .py files, "
        "with commas", flag="import")
    deterministic: bool = option(
        False, "the same seed and settings give the same bits, on GPU too; an operator that cannot is an error (docs/routers.md)", flag="deterministic")
    router: RouterConfig = field(default_factory=RouterConfig)
    losses: dict[str, float] = field(
        default_factory=lambda: {"gshard": 0.01},
        metadata={"help": "weights of the router losses by registered name: gshard, switch, sequence, global_batch, z, ... (see docs/routers.md)", "flag": "losses"},
    )
    dispatch: DispatchConfig = field(default_factory=DispatchConfig)
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)
    comm: CommConfig = field(default_factory=CommConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)

    def __post_init__(self) -> None:
        check_leaves(self, "")
        _check(self.model_dim >= 0, "model_dim", self.model_dim, ">= 0", "let the host fill it in")
        _check(self.num_experts >= 1, "num_experts", self.num_experts, ">= 1", "use 8")
        _check(self.router.top_k <= self.num_experts, "router.top_k", self.router.top_k,
               f"<= num_experts={self.num_experts}", "lower router.top_k or raise num_experts")
        for name, weight in self.losses.items():
            _check(weight >= 0, f"losses.{name}", weight, ">= 0", "use 0 to switch a loss off")
        _check(not self.deterministic or self.parallel.mode != "auto", "parallel.mode", self.parallel.mode, "fixed where deterministic=True",
               "a layout chosen by measured time adds up in another order from run to run: name one with parallel.r and parallel.d")
        uses_load = self.losses.get("load_importance", 0) > 0
        _check(not uses_load or self.router.noise > 0, "losses.load_importance", self.losses.get("load_importance"),
               "0 unless router.noise > 0", "its load term is the probability under the noise: set router.noise, e.g. 1.0")

    @property
    def hidden_dim(self) -> int:
        """Inner width of one expert."""
        return self.experts.hidden_dim or 4 * self.model_dim


def from_dict(values: Mapping[str, Any]) -> MoEConfig:
    """Build and validate a config from plain nested values (YAML, Hydra, a checkpoint).

    Unknown keys, wrong types and bad values are a `ValueError` that names the key, what was expected and the remedy.
    """
    return build(MoEConfig, values, "")


def from_yaml(path: str) -> MoEConfig:
    """Read a YAML file (see `configs/`) into a validated config. A file that is no YAML mapping is a `ValueError`."""
    return from_dict(read_yaml(path))


def to_dict(config: MoEConfig) -> dict[str, Any]:
    """Plain nested values, the inverse of `from_dict`."""
    return dataclasses.asdict(config)


def with_overrides(config: MoEConfig, overrides: Mapping[str, Any]) -> MoEConfig:
    """A new config with dotted-path values replaced: `{"router.top_k": 1}`."""
    tree = OmegaConf.create(to_dict(config))
    for path, value in overrides.items():
        section = hints_of(MoEConfig).get(path)
        if isinstance(value, str) and hasattr(section, "SHORTHAND"):  # else it would wipe out the section's other overrides
            path = f"{path}.{section.SHORTHAND}"
        OmegaConf.update(tree, path, value, merge=False, force_add=True)
    return from_dict(OmegaConf.to_container(tree))  # type: ignore[arg-type]


def register_hydra() -> None:
    """Put the tree in Hydra's ConfigStore as `moe/base` (group `moe`, name `base`)."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(group="moe", name="base", node=to_dict(MoEConfig()))
