"""The two trees of settings: `MoEConfig`, what a layer reads, and `RunConfig`, what a run reads.

A setting is in the tree of what reads it, and can be given nowhere else. Names of sections differ,
so that a file, dotted paths and flags hold settings of both. Defaults live here and nowhere else;
host flags are generated from the trees (`moe_plugin.config.flags`).

Each leaf field carries `help`, and may carry `choices` (a fixed set) or `flag` (the host flag's
name after `--moe-`). Names that come from a registry (router, dispatcher, all-to-all, expert
compute) are checked against that registry when the layer is built, because users may register their
own.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from moe_plugin.config.dispatch import CommConfig, DispatchConfig
from moe_plugin.config.experts import ExpertsConfig
from moe_plugin.config.options import (
    MOST_EXPERTS,
    MOST_WIDTH,
    SettingsSection,
    aliases,
    build,
    canonical,
    check,
    hints_of,
    is_section,
    option,
    says_none,
    unread_allowed,
)
from moe_plugin.config.parallel import ParallelConfig, TunerConfig
from moe_plugin.config.router import RouterConfig
from moe_plugin.config.run import RunConfig, reader_of
from moe_plugin.config.user_modules import import_user_modules
from moe_plugin.utils import determinism
from moe_plugin.utils.messages import cut, short
from moe_plugin.utils.yaml_file import read_yaml


@dataclass(kw_only=True)
class MoEConfig(SettingsSection):
    """All settings of one MoE layer.

    Hosts set `model_dim`; users set the rest by flag, YAML or code.
    """

    model_dim: int = option(0, "width of a token; the host sets it")
    num_experts: int = option(8, "experts in the whole expert-parallel group", flag="num-experts")
    imports: str | None = option(
        None,
        "your own modules, comma-separated dotted names or .py files; imported before names are "
        "looked up, so that they can register routers, losses, ...; in a file only with "
        "--moe-trust-imports",
        flag="import")
    deterministic: bool = option(
        False,
        "the same seed and settings give the same bits, also on GPUs of one model; an operator "
        "that is not deterministic is an error (docs/own_routers.md)",
        flag="deterministic")
    batch_invariant: bool = option(
        False,
        "a token's output is the same, bit for bit, whatever else is in the batch: router and "
        "experts multiply in blocks of one size (docs/rollouts.md)",
        flag="batch-invariant")
    router: RouterConfig = field(default_factory=RouterConfig)
    losses: dict[str, float] = field(
        default_factory=lambda: {"gshard": 0.01}, metadata={
            "help": "weights of the router losses by registered name: gshard, switch, sequence, "
                    "global_batch, z, ... (see docs/balance.md)",
            "flag": "losses", "entry": "name=weight"
        },
    )
    dispatch: DispatchConfig = field(default_factory=DispatchConfig)
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)
    comm: CommConfig = field(default_factory=CommConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    tuner: TunerConfig = field(default_factory=TunerConfig)

    def check_bounds(self) -> None:
        """Check sizes, and settings of several sections against each other."""
        self.within("model_dim", 0, MOST_WIDTH, "let the host set it")
        self.within("num_experts", 1, MOST_EXPERTS, "use 8")
        self.require("router.top_k", self.router.top_k <= self.num_experts,
                     f"<= num_experts={self.num_experts}",
                     "lower router.top_k or raise num_experts")
        self.require("router.top_k_at", max(self.router.several_k) <= self.num_experts,
                     f"<= num_experts={self.num_experts} experts",
                     "lower router.top_k_at or raise num_experts")
        for name, weight in self.losses.items():
            check(weight >= 0, f"losses.{name}", weight, ">= 0", "use 0 to switch a loss off")
        self.require("parallel.mode", not self.deterministic or self.parallel.mode != "auto",
                     "fixed where deterministic=True",
                     "a layout chosen by measured time adds up in another order from run to run: "
                     "set one with parallel.r and parallel.d")
        measured = self.parallel.speeds == "measured"
        self.require("parallel.speeds", not self.deterministic or not measured,
                     "numbers where deterministic=True",
                     "rows that go by measured time add up in another order from run to run: give "
                     "numbers, or none")
        # `device` is also for layouts that are predicted, or named call by call
        self.tuner.read_where(self.parallel.may_be_tuned,
                              f"where parallel.mode={self.parallel.mode}",
                              "use parallel.mode=auto", "max_d", "tries", "samples", "drift",
                              "bucket")
        self._check_links()
        if self.batch_invariant:
            self._check_batch_invariant()
        for name in ("load_importance", "tutel_load_importance"):
            weight = self.losses.get(name, 0)
            check(not weight > 0 or self.router.noise > 0, f"losses.{name}", weight,
                  "0 unless router.noise > 0",
                  "its load term is the probability under the noise: set router.noise, e.g. 1.0")

    def _check_batch_invariant(self) -> None:
        for name, allowed, why in (
                ("dispatch.capacity_factor", (None,), "other tokens decide what is dropped"),
                ("dispatch.eval_capacity_factor", (None,), "other tokens decide what is dropped"),
                ("dispatch.eval_token_fraction", (0.0,), "other tokens decide what is dropped"),
                ("dispatch.name", ("bounded", "deepep", "hybridep", "nccl_ep", "ragged"),
                 "others sum over ranks in an order of the batch"),
                ("parallel.mode", (None, "fixed"), "layouts add up in other orders"),
                ("parallel.spill", (None, "never"), "other tokens decide who computes a row"),
                ("experts.compute", ("auto", "blocks"), "others sum in an order of the batch"),
                ("experts.kind", ("ffn", "gated_ffn"), "others multiply by themselves"),
                ("experts.precision", ("ieee",), "rows share their scales"),
                ("experts.dropout", (0.0,), "random numbers go by the place in the batch"),
                ("router.noise", (0.0,), "random numbers go by the place in the batch"),
                ("router.input_jitter", (0.0,), "random numbers go by the place in the batch"),
                ("router.input_dropout", (0.0,), "random numbers go by the place in the batch"),
                ("router.second_expert_policy", ("all",), "others drop by the batch's numbers")):
            value = operator.attrgetter(name)(self)
            self.require(name, value in allowed,
                         f"{allowed[-1]} where batch_invariant=True",
                         f"{why}; leave it out")

    def _check_links(self) -> None:
        router, links, weighs = self.router, self.router.links, self.losses.get("ta_moe", 0) > 0
        where = f"where router.name={short(router.name)}"
        quota, capacity = (router.may_be_read([name]) for name in ("topology_quota", "ta_moe"))
        links.read_where(quota, where, "use router.name=topology_quota", "quota")
        links.read_where(capacity, where, "use router.name=ta_moe", "pair_capacity",
                         "overflow")
        if links.visited:
            links.read_where(quota or capacity, where, "use router.name=topology_quota or ta_moe",
                             "visited")
        links.read_where(weighs or router.may_be_read([]), "without losses.ta_moe",
                         "use losses.ta_moe", "blend")
        links.read_where(weighs or capacity, f"{where} without losses.ta_moe",
                         "use router.name=ta_moe or losses.ta_moe", "costs", "far")

    def prepare(self) -> None:
        """Before a layer is built: import users' modules, and check what only a layer needs."""
        import_user_modules(self.imports)
        determinism.check(self.deterministic)
        check(self.model_dim >= 1, "model_dim", self.model_dim, ">= 1",
              "set it to the width of the tokens")

    @property
    def hidden_dim(self) -> int:
        """Inner width of one expert."""
        return self.experts.hidden_dim or 4 * self.model_dim

    @property
    def row_dim(self) -> int:
        """Width of the rows that travel, and of the experts' inputs and outputs."""
        return self.experts.latent_dim or self.model_dim


HOSTS = "fairseq", "megatron"  # sections of a file that hold a host's own arguments
MAPPINGS = "losses", "resize.expert_parallel_at", "router.top_k_at"  # leaves that are mappings
_Tree = TypeVar("_Tree", MoEConfig, RunConfig)


def from_dict(values: Mapping[str, Any]) -> MoEConfig:
    """Build and validate a layer's settings from plain nested values.

    Unknown keys, wrong types and bad values are a `ValueError` that names the key, what was
    expected and the remedy; a setting of a run, too.
    """
    return _build(MoEConfig, values)


def run_from_dict(values: Mapping[str, Any]) -> RunConfig:
    """`from_dict` of a run's settings."""
    return _build(RunConfig, values)


def _build(tree: type[_Tree], values: Mapping[str, Any], base: _Tree | None = None) -> _Tree:
    other = RunConfig if tree is MoEConfig else MoEConfig
    for path, value in _part(other, values).items():
        if isinstance(value, Mapping) and value:
            name, value = next(iter(value.items()))
            path = cut(f"{path}.{name}", 60)
        given = f"{path}={short(value)} is a setting of a"
        raise ValueError(
            f"{given} run, which no layer reads: leave it out, or {reader_of(path)}"
            if tree is MoEConfig else f"{given} layer, not of a run: give it in an MoEConfig")
    built: _Tree = build(tree, values, "", base)
    return built


def _part(tree: type[MoEConfig] | type[RunConfig], values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of nested values, or of dotted paths, that are in a tree."""
    names = {f.name for f in dataclasses.fields(tree)}
    return {path: value for path, value in values.items() if str(path).split(".")[0] in names}


def of_run(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run among nested values, or among dotted paths."""
    return _part(RunConfig, values)


def of_layer(values: Mapping[str, Any]) -> dict[str, Any]:
    """All other settings, unknown ones included, whose error is that of a layer's settings."""
    run = of_run(values)
    return {path: value for path, value in values.items() if path not in run}


def run_config(settings: Mapping[str, Any]) -> RunConfig:
    """A run's settings from dotted paths; those of layers are left out."""
    return with_overrides(RunConfig(), of_run(settings))


def from_yaml(path: str, *, trust_imports: bool = False,
              model_dim: int | None = None) -> MoEConfig:
    """Read a layer's settings from a YAML file (see `configs/`), and validate them.

    Args:
        path: the file.
        trust_imports: take its `imports`, too, whose code runs when a layer is built.
        model_dim: in place of the file's; files that several models share have none.
    Raises:
        ValueError: the file is not a YAML mapping, names settings that do not exist or do not fit,
            or of a run, or has `imports` without `trust_imports`.
    """
    values = _read(path, trust_imports)
    with _of_file(path):
        return from_dict(values if model_dim is None else {**values, "model_dim": model_dim})


def both_from_yaml(path: str, *, trust_imports: bool = False,
                   model_dim: int | None = None) -> tuple[MoEConfig, RunConfig]:
    """Read a file with settings of layers and of a run, as hosts do; see `from_yaml`."""
    values = _read(path, trust_imports)
    with _of_file(path):
        own = {} if model_dim is None else {"model_dim": model_dim}
        return from_dict({**of_layer(values), **own}), run_from_dict(of_run(values))


@contextmanager
def _of_file(path: str) -> Iterator[None]:
    """Errors inside name the file."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"config file {short(str(path))}: {error}") from error


def without_hosts(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same nested values without the sections that hosts have in a file for their own arguments
    (`HOSTS`), so that one file serves all hosts.
    """
    return {name: value for name, value in values.items() if name not in HOSTS}


def describes_layers(settings: Mapping[str, Any]) -> bool:
    """Whether dotted paths describe layers as a whole, which those with a number of experts do.

    Then a setting of routing, losses, dispatch or capacity that they leave out has its default of
    this tree in every host. Others leave it to the host's own arguments and defaults.
    """
    return "num_experts" in settings


def _read(path: str, trust_imports: bool) -> dict[str, Any]:
    values = without_hosts(read_yaml(path))
    if not trust_imports and not (values.get("imports") is None or says_none(values["imports"])):
        raise ValueError(
            f"config file {short(str(path))}: imports={short(values['imports'])} would run code, "
            "so the file is refused; where you know who wrote it and those modules, give "
            "--moe-trust-imports (in Python: trust_imports=True), or name the modules with "
            "--moe-import instead")
    return values


def settings_from_yaml(path: str, *, trust_imports: bool = False) -> dict[str, Any]:
    """The settings that a YAML file names, of layers and of a run, as dotted paths; arguments and
    errors as of `from_yaml`.
    """
    values = _read(path, trust_imports)
    with _of_file(path), unread_allowed():  # errors name keys, types and bounds
        trees = _trees_of(values)
    typed = {leaf: value for tree in trees for leaf, value in flatten(to_dict(tree)).items()}
    return {leaf: typed.get(leaf, value)
            for leaf, value in canonical(flatten(values), aliases(MoEConfig)).items()}


def unread(values: Mapping[str, Any]) -> set[str]:
    """The dotted paths of those settings, of layers and of a run, that nothing would read.

    Args:
        values: nested, or dotted paths.
    Raises:
        ValueError: see `from_dict`.
    """
    with unread_allowed() as met:
        _trees_of(values)
    return met


def _trees_of(values: Mapping[str, Any]) -> tuple[MoEConfig, RunConfig]:
    return (with_overrides(MoEConfig(), of_layer(values)),
            with_overrides(RunConfig(), of_run(values)))


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values as dotted paths to leaves; those of `MAPPINGS` are leaves, and so is a mapping
    without entries.
    """
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value and prefix + str(key) not in MAPPINGS:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def to_dict(config: MoEConfig | RunConfig) -> dict[str, Any]:
    """Plain nested values, the inverse of `from_dict`."""
    return dataclasses.asdict(config)


def with_overrides(config: _Tree, overrides: Mapping[str, Any]) -> _Tree:
    """A new tree with dotted-path values replaced: `{"router.top_k": 1}`. It shares the sections
    of which nothing is replaced.
    """
    values: dict[str, Any] = {}
    hints = hints_of(type(config))
    for path, value in canonical(flatten(overrides), aliases(type(config))).items():
        if isinstance(value, str) and is_section(hints.get(path)) and hints[path].SHORTHAND:
            path = f"{path}.{hints[path].SHORTHAND}"
        *above, name = path.split(".")
        section = _section_at(config, values, above, path)
        if value == {} and name in section:  # `router: {}` says nothing
            continue
        section[name] = dict(value) if isinstance(value, Mapping) else value
    return _build(type(config), values, config)


def _section_at(config: MoEConfig | RunConfig, values: dict[str, Any], above: list[str],
                path: str) -> dict[str, Any]:
    """The place in nested values, made if need be, of the section whose names are `above`."""
    hint: Any = type(config)
    for part in above:
        hint = hints_of(hint).get(part) if is_section(hint) else None
        own = config.losses if part == "losses" and isinstance(config, MoEConfig) else None
        if hint is not None and own is None and not is_section(hint):
            raise ValueError(f"unknown key {short(path)}; {short(part)} has no keys below it")
        inner = values.setdefault(part, dict(own or {}))
        if not isinstance(inner, dict):
            raise ValueError(f"{part}={short(inner)} and {short(path)} are given; give one of the "
                             "two")
        values = inner
    return values


def register_hydra() -> None:
    """Put the typed trees in Hydra's ConfigStore as `moe/base` (group `moe`, name `base`)."""
    from hydra.core.config_store import ConfigStore

    node = dataclasses.make_dataclass("Settings", (), bases=(RunConfig, MoEConfig), kw_only=True)
    ConfigStore.instance().store(group="moe", name="base", node=node)
