"""The one tree of settings. Defaults live here and nowhere else; host flags are generated from it
(`moe_plugin.config.flags`).

Each leaf field carries `help`, and may carry `choices` (a fixed set) or `flag` (the host flag's
name after `--moe-`). Names that come from a registry (router, dispatcher, all-to-all, expert
compute) are checked against that registry when the layer is built, because users may register their
own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from moe_plugin import determinism
from moe_plugin.config.comm import CommConfig
from moe_plugin.config.dispatch import DispatchConfig
from moe_plugin.config.experts import ExpertsConfig
from moe_plugin.config.guard import GuardConfig
from moe_plugin.config.observe import ObserveConfig
from moe_plugin.config.offload import OffloadConfig
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
    unread_allowed,
)
from moe_plugin.config.parallel import ParallelConfig
from moe_plugin.config.pipeline import PipelineConfig
from moe_plugin.config.router import RouterConfig
from moe_plugin.config.user_modules import import_user_modules
from moe_plugin.messages import short
from moe_plugin.yaml_file import read_yaml


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
        "the same seed and settings give the same bits, also on GPU; an operator that is not "
        "deterministic is an error (docs/own_routers.md)",
        flag="deterministic")
    router: RouterConfig = field(default_factory=RouterConfig)
    losses: dict[str, float] = field(
        default_factory=lambda: {"gshard": 0.01}, metadata={
            "help": "weights of the router losses by registered name: gshard, switch, sequence, "
                    "global_batch, z, ... (see docs/balance.md)",
            "flag": "losses"
        },
    )
    dispatch: DispatchConfig = field(default_factory=DispatchConfig)
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)
    comm: CommConfig = field(default_factory=CommConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)

    def check_bounds(self) -> None:
        """Check sizes, and settings of several sections against each other."""
        self.within("model_dim", 0, MOST_WIDTH, "let the host set it")
        self.within("num_experts", 1, MOST_EXPERTS, "use 8")
        self.require("router.top_k", self.router.top_k <= self.num_experts,
                     f"<= num_experts={self.num_experts}",
                     "lower router.top_k or raise num_experts")
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
        cuts = self.pipeline.cuts
        self.require("offload.activations", not cuts or self.offload.activations == "keep",
                     f"keep where pipeline.schedule={self.pipeline.schedule} cuts sequences",
                     "use Megatron's --recompute-granularity with slices of sequences, or "
                     "pipeline.schedule=1f1b")
        self._check_links()
        for name in ("load_importance", "tutel_load_importance"):
            weight = self.losses.get(name, 0)
            check(not weight > 0 or self.router.noise > 0, f"losses.{name}", weight,
                  "0 unless router.noise > 0",
                  "its load term is the probability under the noise: set router.noise, e.g. 1.0")

    def _check_links(self) -> None:
        router, links, weighs = self.router, self.router.links, self.losses.get("ta_moe", 0) > 0
        where = f"where router.name={short(router.name)}"
        quota, capacity = (router.may_be_read([name]) for name in ("topology_quota", "ta_moe"))
        links.read_where(quota, where, "use router.name=topology_quota", "quota")
        links.read_where(capacity, where, "use router.name=ta_moe", "pair_capacity")
        links.read_where(weighs or router.may_be_read([]), "without losses.ta_moe",
                         "use losses.ta_moe", "blend")
        links.read_where(weighs or capacity, f"{where} without losses.ta_moe",
                         "use router.name=ta_moe or losses.ta_moe", "costs", "far")

    def prepare(self) -> None:
        """Before a layer is built: import users' modules, and check what only a layer needs."""
        self.parallel.check_read()
        import_user_modules(self.imports)
        determinism.check(self.deterministic)
        check(self.model_dim >= 1, "model_dim", self.model_dim, ">= 1",
              "set it to the width of the tokens")

    @property
    def hidden_dim(self) -> int:
        """Inner width of one expert."""
        return self.experts.hidden_dim or 4 * self.model_dim


def from_dict(values: Mapping[str, Any]) -> MoEConfig:
    """Build and validate a config from plain nested values (YAML, Hydra, a checkpoint).

    Unknown keys, wrong types and bad values are a `ValueError` that names the key, what was
    expected and the remedy.
    """
    config: MoEConfig = build(MoEConfig, values, "")
    return config


def from_yaml(path: str, *, trust_imports: bool = False,
              model_dim: int | None = None) -> MoEConfig:
    """Read a YAML file (see `configs/`) into a validated config.

    Args:
        path: the file.
        trust_imports: take its `imports`, too, whose code runs when a layer is built.
        model_dim: in place of the file's; files that several models share have none.
    Raises:
        ValueError: the file is not a YAML mapping, names settings that do not exist or do not fit,
            or has `imports` without `trust_imports`.
    """
    values = _read(path, trust_imports)
    with _of_file(path):
        return from_dict(values if model_dim is None else {**values, "model_dim": model_dim})


@contextmanager
def _of_file(path: str) -> Iterator[None]:
    """Errors inside name the file."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"config file {short(str(path))}: {error}") from error


def _read(path: str, trust_imports: bool) -> dict[str, Any]:
    values: dict[str, Any] = read_yaml(path)
    if values.get("imports") is not None and not trust_imports:
        raise ValueError(
            f"config file {short(str(path))}: imports={short(values['imports'])} would run code, "
            "so the file is refused; where you know who wrote it and those modules, give "
            "--moe-trust-imports (in Python: trust_imports=True), or name the modules with "
            "--moe-import instead")
    return values


def settings_from_yaml(path: str, *, trust_imports: bool = False) -> dict[str, Any]:
    """The settings that a YAML file names, as dotted paths; arguments and errors as of `from_yaml`.
    """
    values = _read(path, trust_imports)
    with _of_file(path), unread_allowed():  # what is given beside the file may read it
        from_dict(values)  # its errors name keys, types and bounds
    return canonical(flatten(values), aliases(MoEConfig))


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values as dotted paths to leaves; `losses` is one leaf."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and prefix + str(key) != "losses":
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def to_dict(config: MoEConfig) -> dict[str, Any]:
    """Plain nested values, the inverse of `from_dict`."""
    return dataclasses.asdict(config)


def with_overrides(config: MoEConfig, overrides: Mapping[str, Any]) -> MoEConfig:
    """A new config with dotted-path values replaced: `{"router.top_k": 1}`."""
    tree = to_dict(config)
    sections = {name: hint for name, hint in hints_of(MoEConfig).items()
                if is_section(hint)}
    for path, value in canonical(overrides, aliases(MoEConfig)).items():
        # else it would wipe out the section's other overrides
        if isinstance(value, str) and path in sections and sections[path].SHORTHAND:
            path = f"{path}.{sections[path].SHORTHAND}"
        *above, name = path.split(".")
        place = tree
        for part in above:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise ValueError(f"unknown key {short(path)}; {short(part)} has no keys below it")
        place[name] = value
    return from_dict(tree)


def register_hydra() -> None:
    """Put the typed tree in Hydra's ConfigStore as `moe/base` (group `moe`, name `base`)."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(group="moe", name="base", node=MoEConfig)
