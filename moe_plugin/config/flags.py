"""Host flags generated from the trees: every leaf that names a `flag` becomes `--moe-<flag>`.

A flag that is not given stays `None`: then the YAML file of `--moe-config` decides, then the
default.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import logging
import re
import types
import typing
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from moe_plugin.config import (
    MoEConfig,
    RunConfig,
    of_layer,
    run_config,
    settings_from_yaml,
    with_overrides,
)
from moe_plugin.config.options import (
    SettingsSection,
    aliases,
    canonical,
    hints_of,
    is_section,
    says_none,
)
from moe_plugin.config.tree import unread
from moe_plugin.utils.messages import short

logger = logging.getLogger(__name__)
_OF_CAPACITY = ("dispatch.capacity_factor", "dispatch.eval_capacity_factor",
                "dispatch.eval_token_fraction")


@dataclass(frozen=True)
class FlagSpec:
    """One generated flag: its command-line name, its dotted path in the tree, its type and help.

    entry: of a mapping, the form of one, such as name=weight.
    optional: whether the setting may be None, which is written `none`.
    """

    flag: str
    path: str
    kind: type
    help: str
    choices: tuple[str, ...]
    entry: str = ""
    optional: bool = False

    @property
    def dest(self) -> str:
        """Attribute name in a parsed namespace, e.g. `moe_top_k`."""
        return self.flag.removeprefix("--").replace("-", "_")


CONFIG_FLAG = FlagSpec("--moe-config", "", str,
                       "YAML file with the settings of the MoE layers (see configs/)", ())
TRUST_FLAG = FlagSpec("--moe-trust-imports", "", bool,
                      "import the modules that the file of --moe-config names in `imports`, which "
                      "runs their code (default: such a file is refused)", ())


def _leaf_kind(hint: Any) -> type:
    if typing.get_origin(hint) is dict:
        return dict
    options = [a for a in typing.get_args(hint) if a is not types.NoneType]
    kind: type = options[0] if options else hint
    return kind


def _walk(cls: type[SettingsSection], prefix: str) -> Iterator[FlagSpec]:
    hints = hints_of(cls)
    for f in dataclasses.fields(cls):
        if is_section(hints[f.name]):
            yield from _walk(hints[f.name], f"{prefix}{f.name}.")
        elif f.metadata.get("flag"):
            flag = f.metadata.get("prefix", "--moe-") + f.metadata["flag"]
            alias = f.metadata.get("alias")
            kind, choices = _leaf_kind(hints[f.name]), f.metadata.get("choices", ())
            optional = types.NoneType in typing.get_args(hints[f.name])
            yield FlagSpec(flag, prefix + f.name, kind, _help(f), choices,
                           f.metadata.get("entry", ""), optional)
            if alias:
                yield FlagSpec("--moe-" + alias.replace("_", "-"), prefix + alias, kind,
                               f"the same as {flag}", choices, optional=optional)


def _help(f: dataclasses.Field[Any]) -> str:
    default = f.default if f.default is not dataclasses.MISSING else f.default_factory()  # type: ignore[misc]
    return f"{f.metadata['help']} (default: {'none' if default in (None, {}) else default})"


def flag_specs() -> list[FlagSpec]:
    """All generated flags: those about the file, then `setting_specs`."""
    return [CONFIG_FLAG, TRUST_FLAG, *setting_specs()]


@functools.cache
def setting_specs() -> tuple[FlagSpec, ...]:
    """The flags that stand for a setting, of a layer and of a run."""
    return *_walk(MoEConfig, ""), *_walk(RunConfig, "")


def file_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in the file of `--moe-config` that flags leave in force, as dotted paths; {}
    without one.

    What nothing reads any more where the flags are given is left out, and the log says so once.
    `--moe-capacity-factor none` drops no token: then nothing reads what the file says of capacity.

    Args:
        values: parsed flags by `dest`.
    Raises:
        ValueError: see `settings_from_yaml`.
    """
    path = values.get(CONFIG_FLAG.dest)
    if not path:
        return {}
    trusted = bool(parse_value(TRUST_FLAG, values.get(TRUST_FLAG.dest) or "false"))
    found = settings_from_yaml(path, trust_imports=trusted)
    given = settings_from_flags(values)
    apart = {name: value for name, value in found.items() if name not in given
             and name in _made_unread(found, given)}
    if apart:
        _say_once(f"left out of {short(str(path))}, because nothing reads it beside the flags: "
                  + ", ".join(f"{name}={short(value)}" for name, value in apart.items()))
    return {name: value for name, value in found.items() if name not in apart}


def _made_unread(found: Mapping[str, Any], given: Mapping[str, Any]) -> set[str]:
    """The settings of a file, `found`, that are read in the file alone, and not beside `given`."""
    made = set()
    if given.get("dispatch.capacity_factor", 0) is None:
        made = {name for name, value in found.items()
                if name in _OF_CAPACITY or (name, value) == ("dispatch.name", "padded")}
    try:
        return made | (unread({**found, **given}) - unread(found))
    except ValueError:  # the settings themselves are refused later
        return made


@functools.cache
def _say_once(text: str) -> None:
    logger.info(text)


def as_given(text: str, values: Mapping[str, Any],
             other_flags: Mapping[str, str] = types.MappingProxyType({})) -> str:
    """An error's text with the names by which the user gave the settings in it: flag, or file.

    Args:
        values: parsed flags by `dest`.
        other_flags: a host's own flags by the path that they set.
    """
    names = {path: f"in {values[CONFIG_FLAG.dest]}" for path in _in_file(values)}
    names |= {path: flag for path, flag in other_flags.items()}
    second = aliases(MoEConfig)
    names |= {second.get(spec.path, spec.path): f"{spec.flag} {short(values[spec.dest])}"
              for spec in setting_specs() if values.get(spec.dest) is not None}
    found = [f"{path}: {name}" for path, name in names.items()
             if re.search(rf"(?<![\w.-]){re.escape(path)}" + ("" if "." in path else "[=.]"), text)
             and name not in text]
    return f"{text} ({'; '.join(found)})" if found else text


def _in_file(values: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return file_settings(values)
    except ValueError:  # it is the error, and names the file
        return {}


def parse_value(spec: FlagSpec, text: Any) -> Any:
    """A flag's text as a value of the tree. `none` is None; a mapping is `name=number,...`."""
    if not isinstance(text, str):
        return text
    if says_none(text) and "none" not in spec.choices:
        return {} if spec.kind is dict else None
    try:
        if spec.kind is dict:
            pairs = [item.split("=") for item in text.split(",")]
            by_number = spec.entry.startswith("step=")
            found = {(float(key) if "." in key else int(key)) if by_number else key.strip():
                     (int if by_number else float)(value) for key, value in pairs}
            if len(found) < len(pairs):
                raise KeyError("one is given twice")
            return found
        if spec.kind is bool:
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        return spec.kind(text)
    except (ValueError, KeyError) as error:
        wanted = (f"{spec.entry},{spec.entry}, each once" if spec.kind is dict
                  else spec.kind.__name__) + (" or none" if spec.optional else "")
        raise ValueError(f"{spec.flag} {short(text)} cannot be read; must be {wanted}") from error


def flag_texts(settings: Mapping[str, Any]) -> dict[str, str]:
    """Settings by dotted path as flags that say the same: texts by `dest`, the inverse of
    `parse_value`. Settings without a flag are left out.
    """
    specs = {spec.path: spec for spec in setting_specs()}
    return {specs[path].dest: _text(value) for path, value in settings.items() if path in specs}


def _text(value: Any) -> str:
    if value is None or value == {}:
        return "none"
    if isinstance(value, Mapping):
        return ",".join(f"{name}={weight}" for name, weight in value.items())
    return str(value).lower() if isinstance(value, bool) else str(value)


def add_arguments(parser: argparse.ArgumentParser, skip: Container[str] = frozenset()) -> None:
    """Add every generated flag to an argparse parser, except those whose config path is in `skip`.
    """
    group = parser.add_argument_group("moe-plugin")
    for spec in flag_specs():
        if spec.path not in skip:
            bool_flag: dict[str, Any] = {"nargs": "?", "const": "true"} if spec.kind is bool else {}
            group.add_argument(spec.flag, dest=spec.dest, default=None, help=spec.help.replace(
                "%", "%%"), choices=spec.choices or None, metavar=None if spec.choices else "V",
                               **bool_flag)


def config_from_flags(values: Mapping[str, Any],
                      base: Mapping[str, Any] | None = None) -> MoEConfig:
    """A layer's settings from defaults, file, host and flags, each above the one before.

    The file is that of `moe_config`; the host's are `base`.

    Args:
        values: parsed flags by `dest`; absent or None means "not given".
        base: settings which the host itself knows, e.g. `{"model_dim": 512}`.
    Raises:
        ValueError: naming the flag or path, its value, the bound and the remedy.
    """
    return with_overrides(MoEConfig(), of_layer({**file_settings(values), **(base or {}),
                                                 **settings_from_flags(values)}))


def run_from_flags(values: Mapping[str, Any]) -> RunConfig:
    """A run's settings from defaults, file and flags; arguments and errors as of
    `config_from_flags`.
    """
    return run_config({**file_settings(values), **settings_from_flags(values)})


def settings_from_flags(values: Mapping[str, Any],
                        skip: Container[str] = frozenset()) -> dict[str, Any]:
    """The settings given by flag, without those in the file of `--moe-config`, as dotted paths.

    Args:
        values: as of `config_from_flags`.
        skip: paths whose flags the host does not offer.
    Raises:
        ValueError: a flag that cannot be read, a setting that is given under both its names.
    """
    given = {spec.path: parse_value(spec, values[spec.dest]) for spec in setting_specs()
             if values.get(spec.dest) is not None and spec.path not in skip}
    return canonical(given, aliases(MoEConfig))
