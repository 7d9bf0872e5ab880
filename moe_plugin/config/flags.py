"""Command-line flags generated from the settings: every setting that declares a `flag` becomes
`--moe-<flag>`, or `--<flag>` for settings of a whole model.

If a flag is not given, its parsed value is None, and the setting is read from the `--moe-config`
file or keeps its default.
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
from moe_plugin.utils.yaml_file import source_of

logger = logging.getLogger(__name__)
_OF_CAPACITY = ("dispatch.capacity_factor", "dispatch.eval_capacity_factor",
                "dispatch.eval_token_fraction")


@dataclass(frozen=True)
class FlagSpec:
    """One generated command-line flag.

    Attributes:
        flag: command-line name, such as `--moe-top-k`.
        path: dotted path of the setting, or an empty string for flags that specify a settings file.
        kind: type of the setting's value.
        help: help text, including the default value.
        choices: allowed values, or an empty tuple if the flag accepts any value of its type.
        entry: if the setting is a mapping, the form of one entry on the command line, such as
            `name=weight`. Empty for all other settings.
        optional: whether the setting may be None, which is written as `none` on the command line.
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
        """The attribute in which an argparse namespace stores the flag's value, such as
        `moe_top_k`.
        """
        return self.flag.removeprefix("--").replace("-", "_")


CONFIG_FLAG = FlagSpec("--moe-config", "", str,
                       "YAML file with the settings of the MoE layers (see configs/)", ())
TRUST_FLAG = FlagSpec("--moe-trust-imports", "", bool,
                      "import the modules named by `imports` in the file of --moe-config, which "
                      "runs their code (default: a file with `imports` is refused)", ())


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
    """Return all generated flags. The flags that specify a settings file come first, followed by
    the flags of `setting_specs`.
    """
    return [CONFIG_FLAG, TRUST_FLAG, *setting_specs()]


@functools.cache
def setting_specs() -> tuple[FlagSpec, ...]:
    """Return the flags that set a single setting of a layer or a run."""
    return *_walk(MoEConfig, ""), *_walk(RunConfig, "")


def file_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in the `--moe-config` file that are not overridden by flags, by dotted
    path.

    Settings that have no effect because of a flag are omitted and logged once. For example, with
    `--moe-capacity-factor none`, the capacity settings in the file have no effect.

    Args:
        values: parsed values of the flags, by `FlagSpec.dest`.
    Returns: Setting values by dotted path. The mapping is empty if the user does not pass
    `--moe-config`.
    Raises:
        ValueError: see `settings_from_yaml`.
    """
    path = values.get(CONFIG_FLAG.dest)
    if not path:
        return {}
    trusted = bool(parse_value(TRUST_FLAG, values.get(TRUST_FLAG.dest) or "false"))
    file_values = settings_from_yaml(path, trust_imports=trusted)
    given = settings_from_flags(values)
    ineffective = {name: value for name, value in file_values.items()
                   if name not in given and name in _made_unread(file_values, given)}
    if ineffective:
        _say_once(f"left out of {source_of(path)}, because the flags make it ineffective: "
                  + ", ".join(f"{name}={short(value)}" for name, value in ineffective.items()))
    return {name: value for name, value in file_values.items() if name not in ineffective}


def _made_unread(found: Mapping[str, Any], given: Mapping[str, Any]) -> set[str]:
    """Return the settings from the file (`found`) that have no effect because of the flags in
    `given`.
    """
    made = set()
    if given.get("dispatch.capacity_factor", 0) is None:
        made = {name for name, value in found.items()
                if name in _OF_CAPACITY or (name, value) == ("dispatch.name", "padded")}
    try:
        return made | (unread({**found, **given}) - unread(found))
    except ValueError:  # a later check reports the invalid settings
        return made


@functools.cache
def _say_once(text: str) -> None:
    logger.info(text)


def as_given(text: str, values: Mapping[str, Any],
             other_flags: Mapping[str, str] = types.MappingProxyType({})) -> str:
    """For each setting that an error message mentions, append the flag or file that set it.

    Args:
        text: the error message.
        values: parsed values of the flags, by `FlagSpec.dest`.
        other_flags: optional. Names of the host's own flags, by the dotted path of the setting that
            each flag sets.
    """
    names = {path: f"in {source_of(values[CONFIG_FLAG.dest])}" for path in _in_file(values)}
    names |= {path: flag for path, flag in other_flags.items()}
    second = aliases(MoEConfig)
    names |= {second.get(spec.path, spec.path): f"{spec.flag} {short(values[spec.dest])}"
              for spec in setting_specs() if values.get(spec.dest) is not None}
    sources = [f"{path}: {name}" for path, name in names.items() if name not in text
               and re.search(rf"(?<![\w.-]){re.escape(path)}" + ("" if "." in path else "[=.]"),
                             text)]
    return f"{text} ({'; '.join(sources)})" if sources else text


def _in_file(values: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return file_settings(values)
    except ValueError:  # this error is the one being reported, and it already names the file
        return {}


def parse_value(spec: FlagSpec, text: Any) -> Any:
    """Convert the string given for a flag to the type of its setting.

    The string `none` is converted to None. A mapping is written as `name=number,...`.

    Raises:
        ValueError: If the string cannot be converted to the type of the setting.
    """
    if not isinstance(text, str):
        return text
    if says_none(text) and "none" not in spec.choices:
        return {} if spec.kind is dict else None
    try:
        if spec.kind is dict:
            pairs = [item.split("=") for item in text.split(",")]
            by_number = spec.entry.startswith("step=")
            mapping = {(float(key) if "." in key else int(key)) if by_number else key.strip():
                       (int if by_number else float)(value) for key, value in pairs}
            if len(mapping) < len(pairs):
                raise KeyError("one is given twice")
            return mapping
        if spec.kind is bool:
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        return spec.kind(text)
    except (ValueError, KeyError) as error:
        wanted = (f"{spec.entry},{spec.entry}, each once" if spec.kind is dict
                  else spec.kind.__name__) + (" or none" if spec.optional else "")
        raise ValueError(f"{spec.flag} {short(text)} cannot be read; must be {wanted}") from error


def add_arguments(parser: argparse.ArgumentParser, skip: Container[str] = frozenset()) -> None:
    """Add all generated flags to an argparse parser, except flags for the dotted paths in `skip`.
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
    """Build the settings of a layer from four sources: the defaults, the `--moe-config` file, the
    host and the flags.

    Later sources in this list override earlier sources.

    Args:
        values: parsed values of the flags, by `FlagSpec.dest`. A flag whose value is missing or
            None is treated as not given.
        base: optional. Settings supplied by the host, by dotted path, such as `{"model_dim": 512}`.
    Raises:
        ValueError: If a setting is invalid. The message contains the flag or dotted path, the
            invalid value, the bound and the remedy.
    """
    return with_overrides(MoEConfig(), of_layer({**file_settings(values), **(base or {}),
                                                 **settings_from_flags(values)}))


def run_from_flags(values: Mapping[str, Any]) -> RunConfig:
    """Build the settings of a run from the defaults, the `--moe-config` file and the flags.

    Args:
        values: parsed values of the flags, by `FlagSpec.dest`. A flag whose value is missing or
            None is treated as not given.
    Raises:
        ValueError: If a setting is invalid, as in `config_from_flags`.
    """
    return run_config({**file_settings(values), **settings_from_flags(values)})


def settings_from_flags(values: Mapping[str, Any],
                        skip: Container[str] = frozenset()) -> dict[str, Any]:
    """Return the settings that the user gave as flags, by dotted path. Settings from the
    `--moe-config` file are not included.

    Args:
        values: parsed values of the flags, by `FlagSpec.dest`. A flag that is absent or None is
            treated as not given.
        skip: dotted paths of settings for which the host has no flag.
    Raises:
        ValueError: If a flag cannot be parsed, or if a setting is given under both its name and its
            alias.
    """
    given = {spec.path: parse_value(spec, values[spec.dest]) for spec in setting_specs()
             if values.get(spec.dest) is not None and spec.path not in skip}
    if [given.get(name, 0) is None for name in _OF_CAPACITY[:2]] == [False, True]:
        raise ValueError(
            "--moe-eval-capacity-factor none is ambiguous: evaluation would use the training "
            "capacity factor and might drop tokens. Leave out the flag to use the training "
            "capacity factor, or use 0 to drop no tokens in evaluation")
    return canonical(given, aliases(MoEConfig))
