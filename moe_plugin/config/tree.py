"""The two settings trees: `MoEConfig`, which a layer reads, and `RunConfig`, which a training run
reads.

Each setting belongs to exactly one of these two trees. The two trees have no section name in
common, so a single file, mapping or command line can contain settings of both trees. All default
values are defined in `moe_plugin.config`. `moe_plugin.config.flags` generates the hosts'
command-line flags from the two trees.

Each setting declares a `help` text. A setting may also declare `choices` (a fixed set of allowed
values) and a `flag` (the name of its command-line flag after `--moe-`). The names of routers,
dispatchers, all-to-all algorithms and compute strategies are checked only when the layer is built,
because users can register their own.
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
from moe_plugin.utils import determinism
from moe_plugin.utils.messages import cut, short
from moe_plugin.utils.registry import import_user_modules
from moe_plugin.utils.yaml_file import read_yaml, source_of


@dataclass(kw_only=True)
class MoEConfig(SettingsSection):
    """All settings of one MoE layer, which can be set with flags, in a YAML file or in Python.

    Hosts set `model_dim`.
    """

    model_dim: int = option(0, "width of a token; the host sets it")
    num_experts: int = option(8, "number of experts in the whole expert-parallel group",
                              flag="num-experts")
    imports: str | None = option(None, "your own modules, as dotted names or .py files separated "
                                 "by commas. They are imported before names are looked up, so that "
                                 "they can register routers, losses and so on. In a file, "
                                 "`imports` requires --moe-trust-imports", flag="import")
    deterministic: bool = option(False, "the same seed and settings produce the same bits, "
                                 "including on GPUs of the same model; a nondeterministic operator "
                                 "is an error (docs/own_routers.md)", flag="deterministic")
    batch_invariant: bool = option(False, "make each token's output bitwise independent of the "
                                   "rest of the batch, with matmuls in blocks of a fixed size "
                                   "(docs/rollouts.md)", flag="batch-invariant")
    router: RouterConfig = field(default_factory=RouterConfig)
    losses: dict[str, float] = field(
        default_factory=lambda: {"gshard": 0.01}, metadata={
            "help": "weights of the router losses by registered name: gshard, switch, sequence, "
                    "global_batch, z, ... (see docs/balance.md)",
            "flag": "losses", "entry": "name=weight"
        })
    dispatch: DispatchConfig = field(default_factory=DispatchConfig)
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)
    comm: CommConfig = field(default_factory=CommConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    tuner: TunerConfig = field(default_factory=TunerConfig)

    def check_bounds(self) -> None:
        """Check the sizes, and the combinations of settings from different sections."""
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
                     "a layout chosen by measured time changes the order of sums from run to run; "
                     "set a layout with parallel.r and parallel.d")
        measured = self.parallel.speeds == "measured"
        self.require("parallel.speeds", not self.deterministic or not measured,
                     "numbers where deterministic=True",
                     "rows that move by measured time change the order of sums from run to run; "
                     "use numbers, or none")
        # `device` is excluded: predicted layouts and layouts chosen per call read it as well.
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
                  "its load term is a probability under the noise; set router.noise, e.g. to 1.0")

    def _check_batch_invariant(self) -> None:
        for name, allowed, why in (
                ("dispatch.capacity_factor", (None,), "the batch decides what is dropped"),
                ("dispatch.eval_capacity_factor", (None,), "the batch decides what is dropped"),
                ("dispatch.eval_token_fraction", (0.0,), "the batch decides what is dropped"),
                ("dispatch.name", ("bounded", "deepep", "hybridep", "nccl_ep", "ragged"),
                 "others sum over ranks in an order set by the batch"),
                ("dispatch.send", ("auto", "rows"),
                 "a rank sums the results of its experts, so the sum depends on the ranks"),
                ("parallel.mode", (None, "fixed"), "layouts sum in different orders"),
                ("parallel.spill", (None, "never"), "the batch decides where rows are computed"),
                ("experts.compute", ("auto", "blocks"), "others sum in an order set by the batch"),
                ("experts.kind", ("ffn", "gated_ffn"), "other kinds use their own matrix products"),
                ("experts.precision", ("ieee",), "rows share quantization scales"),
                ("experts.dropout", (0.0,), "random numbers depend on the batch position"),
                ("router.noise", (0.0,), "random numbers depend on the batch position"),
                ("router.input_jitter", (0.0,), "random numbers depend on the batch position"),
                ("router.input_dropout", (0.0,), "random numbers depend on the batch position"),
                ("router.second_expert_policy", ("all",), "others drop choices at random")):
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
        """Import the user's modules, and check the requirements that apply only when a layer is
        built."""
        import_user_modules(self.imports)
        determinism.check(self.deterministic)
        check(self.model_dim >= 1, "model_dim", self.model_dim, ">= 1",
              "set it to the width of the tokens")

    @property
    def hidden_dim(self) -> int:
        """The inner width of each expert."""
        return self.experts.hidden_dim or 4 * self.model_dim

    @property
    def row_dim(self) -> int:
        """The width of the experts' inputs and outputs, and of the rows sent between ranks."""
        return self.experts.latent_dim or self.model_dim


HOSTS = "fairseq", "megatron"  # sections of a file with a host's own arguments
MAPPINGS = "losses", "resize.expert_parallel_at", "router.top_k_at"  # settings with mappings
_Tree = TypeVar("_Tree", MoEConfig, RunConfig)


def from_dict(values: Mapping[str, Any]) -> MoEConfig:
    """Build and validate the settings of a layer from plain nested values.

    Raises:
        ValueError: If a key is unknown, a value is invalid, or a setting belongs to the settings of
            a run. The message contains the key, the allowed values and a remedy.
    """
    return _build(MoEConfig, values)


def run_from_dict(values: Mapping[str, Any]) -> RunConfig:
    """Build and validate the settings of a run from plain nested values.

    Raises:
        ValueError: If a value is invalid, or if a setting belongs to the settings of a layer.
    """
    return _build(RunConfig, values)


def _build(tree: type[_Tree], values: Mapping[str, Any], base: _Tree | None = None) -> _Tree:
    other = RunConfig if tree is MoEConfig else MoEConfig
    for path, value in _part(other, values).items():
        if isinstance(value, Mapping) and value:
            name, value = next(iter(value.items()))
            path = cut(f"{path}.{name}", 60)
        given = f"{path}={short(value)} is a setting of a"
        raise ValueError(
            f"{given} run and has no effect on a layer: leave it out, or {reader_of(path)}"
            if tree is MoEConfig else f"{given} layer, not of a run: pass it to MoEConfig")
    built: _Tree = build(tree, values, "", base)
    return built


def _part(tree: type[MoEConfig] | type[RunConfig], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that belong to the given settings tree. `values` may be nested or keyed by
    dotted path."""
    names = {f.name for f in dataclasses.fields(tree)}
    return {path: value for path, value in values.items() if str(path).split(".")[0] in names}


def of_run(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are run settings. `values` may be nested or keyed by dotted path."""
    return _part(RunConfig, values)


def of_layer(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return all values that are not run settings.

    Unknown names are included, so that they are later reported as unknown layer settings.
    """
    run = of_run(values)
    return {path: value for path, value in values.items() if path not in run}


def run_config(settings: Mapping[str, Any]) -> RunConfig:
    """Build the settings of a run from a mapping of dotted paths to values. Layer settings in the
    mapping are ignored."""
    return with_overrides(RunConfig(), of_run(settings))


def from_yaml(path: str, *, trust_imports: bool = False,
              model_dim: int | None = None) -> MoEConfig:
    """Read and validate the settings of a layer from a YAML file (see `configs/`).

    Args:
        path: path of the YAML file.
        trust_imports: whether the file may contain the setting `imports`. The modules listed in
            `imports` are executed when a layer is built.
        model_dim: optional. Token width (D) that overrides the file's `model_dim`. Files that are
            shared by several models do not set `model_dim`.
    Raises:
        ValueError: If the file is not a YAML mapping, if it contains an unknown setting, an invalid
            value or a run setting, or if it sets `imports` without `trust_imports`.
    """
    values = _read(path, trust_imports)
    with _of_file(path):
        return from_dict(values if model_dim is None else {**values, "model_dim": model_dim})


def both_from_yaml(path: str, *, trust_imports: bool = False,
                   model_dim: int | None = None) -> tuple[MoEConfig, RunConfig]:
    """Read a YAML file that contains both layer settings and run settings. The hosts use this
    function. The arguments and the errors are the same as in `from_yaml`."""
    values = _read(path, trust_imports)
    with _of_file(path):
        extra = {} if model_dim is None else {"model_dim": model_dim}
        return from_dict({**of_layer(values), **extra}), run_from_dict(of_run(values))


@contextmanager
def _of_file(path: str) -> Iterator[None]:
    """Add the path of the settings file to the message of any error raised inside the block."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{source_of(path, 'config file')}: {error}") from error


def without_hosts(values: Mapping[str, Any]) -> dict[str, Any]:
    """Remove the sections in `HOSTS`, which contain the hosts' own arguments, from nested values,
    so that one settings file can be used with every host.
    """
    return {name: value for name, value in values.items() if name not in HOSTS}


def describes_layers(settings: Mapping[str, Any]) -> bool:
    """Return whether the given dotted paths fully specify a layer, that is, whether they include
    `num_experts`.

    With `num_experts`, missing settings for routing, losses, dispatch and capacity get the defaults
    of `MoEConfig` in every host. Without `num_experts`, missing settings get the host's own
    arguments and defaults.
    """
    return "num_experts" in settings


def _read(path: str, trust_imports: bool) -> dict[str, Any]:
    values = without_hosts(read_yaml(path))
    if not trust_imports and not (values.get("imports") is None or says_none(values["imports"])):
        raise ValueError(
            f"{source_of(path, 'config file')}: imports={short(values['imports'])} would run code, "
            "so the file is refused. If you trust the file and its modules, use "
            "--moe-trust-imports (in Python: trust_imports=True), or name the modules with "
            "--moe-import instead")
    return values


def settings_from_yaml(path: str, *, trust_imports: bool = False) -> dict[str, Any]:
    """Return all layer settings and run settings in a YAML file, by dotted path.

    Arguments and errors are the same as in `from_yaml`, except that run settings are accepted.
    """
    values = _read(path, trust_imports)
    with _of_file(path), unread_allowed():  # errors name keys, types and bounds
        trees = _trees_of(values)
    typed = {leaf: value for tree in trees for leaf, value in flatten(to_dict(tree)).items()}
    return {leaf: typed.get(leaf, value)
            for leaf, value in canonical(flatten(values), aliases(MoEConfig)).items()}


def unread(values: Mapping[str, Any]) -> set[str]:
    """Return the dotted paths of the given layer and run settings that would have no effect.

    Args:
        values: nested values, or values by dotted path.
    Raises:
        ValueError: If a setting is invalid, as in `from_dict`.
    """
    with unread_allowed() as met:
        _trees_of(values)
    return met


def _trees_of(values: Mapping[str, Any]) -> tuple[MoEConfig, RunConfig]:
    return (with_overrides(MoEConfig(), of_layer(values)),
            with_overrides(RunConfig(), of_run(values)))


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Convert nested values to values by dotted path.

    Empty mappings and the mappings listed in `MAPPINGS` are kept as single values.
    """
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value and prefix + str(key) not in MAPPINGS:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def to_dict(config: MoEConfig | RunConfig) -> dict[str, Any]:
    """Convert the settings of a layer or run to a nested dictionary. This function is the inverse
    of `from_dict`."""
    return dataclasses.asdict(config)


def with_overrides(config: _Tree, overrides: Mapping[str, Any]) -> _Tree:
    """Return new settings in which the values of the given dotted paths are replaced, for example
    `{"router.top_k": 1}`.

    Sections without replaced values are shared between the old and the new settings."""
    values: dict[str, Any] = {}
    hints = hints_of(type(config))
    for path, value in canonical(flatten(overrides), aliases(type(config))).items():
        if isinstance(value, str) and is_section(hints.get(path)) and hints[path].SHORTHAND:
            path = f"{path}.{hints[path].SHORTHAND}"
        *above, name = path.split(".")
        section = _section_at(config, values, above, path)
        if value == {} and name in section:  # `router: {}` changes nothing
            continue
        section[name] = dict(value) if isinstance(value, Mapping) else value
    return _build(type(config), values, config)


def _section_at(config: MoEConfig | RunConfig, values: dict[str, Any], above: list[str],
                path: str) -> dict[str, Any]:
    """Return the mapping for the section with the path `above`, and add it to `values` if it does
    not exist."""
    hint: Any = type(config)
    for part in above:
        hint = hints_of(hint).get(part) if is_section(hint) else None
        defaults = config.losses if part == "losses" and isinstance(config, MoEConfig) else None
        if hint is not None and defaults is None and not is_section(hint):
            raise ValueError(f"unknown key {short(path)}; {short(part)} has no keys below it")
        inner = values.setdefault(part, dict(defaults or {}))
        if not isinstance(inner, dict):
            raise ValueError(f"{part}={short(inner)} and {short(path)} are given; give one of the "
                             "two")
        values = inner
    return values


def register_hydra() -> None:
    """Register the settings of layers and runs in Hydra's `ConfigStore` as `moe/base` (group `moe`,
    name `base`)."""
    from hydra.core.config_store import ConfigStore

    node = dataclasses.make_dataclass("Settings", (), bases=(RunConfig, MoEConfig), kw_only=True)
    ConfigStore.instance().store(group="moe", name="base", node=node)
