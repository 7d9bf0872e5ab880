"""Megatron's arguments in the `--moe-config` file, and individual settings on the command line.

    megatron: # names of the script's arguments, with - or _
      num_layers: 4
      moe_router_load_balancing_type: [aux_loss, seq_aux_loss]
      swiglu: true
      disable_bias_linear: true     # or add_bias_linear: false, by the attribute's name
    router: {fp32: true}            # settings of this package, in the same file

Command-line settings such as `megatron.num_layers=8` and `router.fp32=false` override the file.
Flags override both the file and these command-line settings. The section `megatron` is converted to
command-line arguments, which are inserted before the user's arguments. Megatron's own parser can
then check the types and choices of all arguments. If the file contains a setting of this package
that corresponds to an argument of Megatron, Megatron's argument is also inserted. For example,
`num_experts: 8` becomes `--num-experts 8`. If an argument contradicts the file, building a layer
raises an error.
"""

from __future__ import annotations

import argparse
import functools
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from moe_plugin.config import settings_from_yaml
from moe_plugin.config.flags import CONFIG_FLAG, TRUST_FLAG, setting_specs
from moe_plugin.hosts.megatron.compat.settings import newer_name
from moe_plugin.hosts.megatron.translate import NATIVE_ARGUMENTS, native_arguments
from moe_plugin.utils.messages import did_you_mean, short, similar_names
from moe_plugin.utils.yaml_file import host_section, read_yaml

Flag = tuple[str, dict[str, Any]]

FUSED_ADAM: Flag = ("moe-fused-adam", {
    "action": "store_true", "help": "use torch's fused Adam kernels on CPU and GPU if Megatron "
    "would use torch's Adam (without Apex and Transformer Engine); results differ only by rounding"
})
LOG_FILE: Flag = ("log-file", {
    "help": "JSONL file with one object per logged iteration; default: log.jsonl in --save"})
STAGE_LAYOUTS: Flag = ("stage-layouts", {
    "nargs": "+", "metavar": "tp=N,ep=N",
    "help": "pipeline stages with different layouts, one entry per stage"})
NATIVE_MOE: Flag = ("native-moe", {
    "action": "store_true", "help": "use Megatron's own MoE layer in --spec "
    "moe_plugin.hosts.megatron.spec, for comparison"})
TRUST: Flag = ("trust-checkpoint", {
    "action": "store_true", "help": "also load checkpoints whose files could run code"})
LIGHTHOUSE: Flag = ("moe-lighthouse", {
    "help": "http://HOST:PORT of a torchft lighthouse, which makes this run one of several "
    "replicas that may join and leave (docs/replicas.md); default: no replicas"})
REPLICA: Flag = ("moe-replica", {
    "type": int, "default": 0,
    "help": "number of this run among the replicas of --moe-lighthouse"})
ALL = FUSED_ADAM, LOG_FILE, STAGE_LAYOUTS, NATIVE_MOE, TRUST, LIGHTHOUSE, REPLICA


SECTION = "megatron"
_OVERRIDE = re.compile(r"([a-z_]+(?:\.[A-Za-z_][\w-]*)+)=(.*)", re.S)
Parser = argparse.ArgumentParser


@dataclass(frozen=True)
class FileArguments:
    """The arguments in a command line and in its settings file.

    Attributes:
        words: list of the command-line arguments, without settings of the form
            `megatron.NAME=VALUE`. Settings of this package, such as `router.fp32=false`, are
            converted to flags.
        path: path of the settings file, or None if `--moe-config` is not used.
        section: dict of Megatron's arguments from the settings file and the command line, with the
            names that the user wrote.
        settings: dict of this package's settings from the file, by dotted path.
    """

    words: list[str]
    path: str | None
    section: Mapping[str, Any]
    settings: Mapping[str, Any]

    def before_those_of(self, parser: Parser) -> tuple[list[str], dict[str, bool]]:
        """Convert Megatron's arguments in the file to command-line arguments. Also return a dict of
        attributes that no command-line argument can set.

        The dict of attributes contains switches that can be turned on or off in the file, but not
        on the command line.

        Raises:
            ValueError: If the parser does not define an argument or does not accept its value.
        """
        kept: dict[str, bool] = {}
        known = {action.dest for action in parser._actions}
        words = [word for ours, value in native_arguments(self.settings).items()
                 if (name := newer_name(ours, known)) in known
                 for word in self._words(parser, name, value, kept)]
        return words + [word for name, value in self.section.items()
                        for word in self._words(parser, name, value, kept)], kept

    def _words(self, parser: Parser, name: str, value: Any, kept: dict[str, bool]) -> list[str]:
        """Return the command-line arguments for one argument in the file. Attributes that no flag
        can set are added to `kept`.
        """
        key = str(name).replace("-", "_")
        if value is None:
            value = _Nothing
        by_flag = {option.lstrip("-").replace("-", "_"): (action, option)
                   for action in parser._actions for option in action.option_strings}
        ours = {spec.dest: spec.path for spec in setting_specs()}
        where = f"{SECTION}.{name}" + (f" of {short(self.path)}" if self.path else "")
        if key in ours or key in (CONFIG_FLAG.dest, TRUST_FLAG.dest):
            remedy = f"Write it as {ours[key]} outside" if ours.get(key) else \
                "Pass it on the command line, not in"
            raise ValueError(f"{where} is a setting of moe-plugin. {remedy} the section {SECTION}.")
        of_dest = [action for action in parser._actions if action.dest == key]
        if not of_dest and key not in by_flag:
            near = similar_names(key, {*by_flag, *(action.dest for action in parser._actions)})
            raise ValueError(f"{where} is not an argument of this script; {did_you_mean(near)}"
                             "leave it out (--help lists all arguments)")
        if value is _Nothing:
            return []
        if of_dest:
            return _by_attribute(where, of_dest, value, kept)
        action, option = by_flag[key]
        return _by_flag(where, action, option, value, kept)


class _Nothing:
    """Placeholder for an argument that has no value in the file."""


def reads_file(parser: Parser) -> Parser:
    """Make a parser also read the `--moe-config` file and individual settings. Return the parser.

    The parser processes the arguments from the file (see `file_arguments`) before those of the
    command line.
    """
    parse = parser.parse_known_args

    @functools.wraps(parse)
    def parse_known_args(args: Any = None, namespace: Any = None) -> Any:
        in_file = file_arguments(sys.argv[1:] if args is None else args)
        words, kept = in_file.before_those_of(parser)
        # set before argparse fills in its defaults: argparse does not overwrite attributes that
        # already exist
        namespace = argparse.Namespace() if namespace is None else namespace
        vars(namespace).update(kept)
        return parse([*words, *in_file.words], namespace)

    parser.parse_known_args = parse_known_args  # type: ignore[assignment]
    return parser


def file_arguments(words: Iterable[str]) -> FileArguments:
    """Read the settings file and the individual settings of a command line.

    Raises:
        ValueError: If the file cannot be read, its section `megatron` is not a mapping, a setting
            does not exist, or `--yaml-cfg` is used.
    """
    kept, section, path, trusted = list[str](), dict[str, Any](), None, False
    words = list(words)
    for index, word in enumerate(words):
        name, _, value = word.partition("=")
        if name == "--yaml-cfg":
            raise ValueError(
                "--yaml-cfg cannot be used with moe-plugin's launcher, because Megatron then "
                "ignores the whole command line. Write Megatron's arguments into the section "
                f"{SECTION} of a YAML file, and pass {CONFIG_FLAG.flag} FILE.")
        if name == CONFIG_FLAG.flag:
            path = value if "=" in word else next(iter(words[index + 1:]), None)
        trusted |= name == TRUST_FLAG.flag and value != "false"
        override = _OVERRIDE.fullmatch(word)
        if override and override[1].startswith(f"{SECTION}."):
            section[override[1].removeprefix(f"{SECTION}.")] = _value(override[2])
        else:
            kept.append(_as_flag(override[1], override[2]) or word if override else word)
    section_of_file = host_section(read_yaml(path), path, SECTION, "Megatron") if path else {}
    # single settings replace those of the file, whose names may be spelled with - or _
    in_file = {name.replace("-", "_"): name for name in section_of_file}
    section = {**section_of_file, **{in_file.get(name.replace("-", "_"), name): value
                                     for name, value in section.items()}}
    return FileArguments(kept, path, section,
                         settings_from_yaml(path, trust_imports=trusted) if path else {})


def _value(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _as_flag(path: str, text: str) -> str | None:
    specs = {spec.path: spec for spec in setting_specs()}
    if path in NATIVE_ARGUMENTS:
        raise ValueError(f"{path}={short(text)} cannot be set here, because Megatron has its own "
                         f"argument for it. Use {NATIVE_ARGUMENTS[path]}.")
    if path in specs:
        return f"{specs[path].flag}={text}"
    if path.split(".")[0] in {known.split(".")[0] for known in specs if "." in known}:
        raise ValueError(f"unknown key {short(path)}; {did_you_mean(similar_names(path, specs))}"
                         "see docs/config.md for all settings")
    return None  # the word may be the value of a flag, or belong to the script


def _by_attribute(where: str, actions: list[argparse.Action], value: Any,
                  kept: dict[str, bool]) -> list[str]:
    for action in actions:
        if isinstance(action, argparse.BooleanOptionalAction):
            if isinstance(value, bool):
                return [next(option for option in action.option_strings
                             if option.startswith("--no-") is not value)]
        elif action.nargs == 0:
            if isinstance(value, bool) and action.const is value:
                return [action.option_strings[0]]
        else:
            return _with_value(where, action, action.option_strings[-1], value)
    if not isinstance(value, bool):
        raise _no_switch(where, value)
    for action in actions:
        if isinstance(action.const, bool):
            kept[action.dest] = value
    return []


def _by_flag(where: str, action: argparse.Action, option: str, value: Any,
             kept: dict[str, bool]) -> list[str]:
    either = isinstance(action, argparse.BooleanOptionalAction)
    if action.nargs == 0 or either:
        if not isinstance(value, bool):
            raise _no_switch(where, value)
        gives = not option.startswith("--no-") if either else action.const
        if not value and isinstance(gives, bool):
            kept[action.dest] = not gives
        return [option] if value else []
    return _with_value(where, action, option, value)


def _with_value(where: str, action: argparse.Action, option: str, value: Any) -> list[str]:
    if isinstance(value, Mapping):
        raise ValueError(f"{where}={short(value)} must be a single value or a list. Write it as "
                         "you would on the command line.")
    if action.nargs in (None, "?"):
        return [f"{option}={value}"]
    return [option, *map(str, value if isinstance(value, list) else [value])]


def _no_switch(where: str, value: Any) -> ValueError:
    return ValueError(f"{where}={short(value)} must be true or false, because it is a switch")
