"""Additional flags and short error messages for fairseq's command lines, including
`fairseq-hydra-train`, which also finds the bundled settings from any folder.

The additional flags concern checkpoints and the placement of experts. The flags of fairseq's `moe`
branch are also added, so that launch scripts written for the branch run unchanged. Each error
message is one line long, states what to do, and is printed once per node. Errors in MoE settings
are reported before any object is built.
"""

from __future__ import annotations

import argparse
import functools
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from moe_plugin.checkpoint import trust
from moe_plugin.config.flags import CONFIG_FLAG, as_given, flag_specs, setting_specs
from moe_plugin.hosts.fairseq.compat.launch import STATUS_OF_USE, errors_of_use_in_one_line, is_ours
from moe_plugin.hosts.fairseq.compat.patching import Overlay, patch, replace, replaces
from moe_plugin.hosts.fairseq.compat.userdir import search_bundled_groups
from moe_plugin.utils.messages import Parser, did_you_mean, flag_names, short, similar_names
from moe_plugin.utils.yaml_file import bundled, host_section, read_yaml

logger = logging.getLogger(__name__)
_USER_DIR, _SECTION = "--user-dir", "fairseq"
_OURS = "invalid choice: 'moe_"  # begins argparse's error for the names of our models and criteria
# settings of the placement of experts
_PATHS = (*(f"experts.{name}" for name in (
    "store", "cache", "cache_policy", "store_path", "store_throttle")), "router.predict")
# flags of the branch's training scripts for features that fairseq 0.12 does not have
WITHOUT_EFFECT = {
    "--log-nvidia-smi": "accepted; run nvidia-smi next to the training",
    "--use-stable-embedding": "accepted; fairseq's own embeddings without a layer norm are used",
    "--block-wise": "accepted; it is a setting of the branch's 8-bit Adam",
}


class _WithoutEffect(argparse.Action):
    """An argparse action that logs a warning, for a flag that has no effect."""

    def __call__(self, parser: Any, namespace: Any, values: Any,
                 option_string: str | None = None) -> None:
        logger.warning("%s has no effect: %s", option_string, self.help)
        setattr(namespace, self.dest, self.const if self.nargs == 0 else values)


def _for_all(parser: Any) -> None:
    parser.add_argument(
        trust.FLAG, action="store_true",
        help="load checkpoints that contain classes not listed as safe, which can run code")
    for flag, text in WITHOUT_EFFECT.items():
        parser.add_argument(flag, action=_WithoutEffect, nargs=0, default=False, const=True,
                            help=text)


def _for_training(parser: Any) -> None:
    parser.add_argument(
        "--num-workers-valid", type=int, action=_WithoutEffect,
        help="accepted; validation data uses --num-workers, like training data")


def _for_scores(group: Any) -> None:
    group.add_argument("--is-moe", action="store_true",
                       help="accepted but not needed: the checkpoint records if it has experts")


def _for_evaluation(parser: Any) -> None:
    group = parser.add_argument_group("placement of experts")
    for spec in setting_specs():
        if spec.path in _PATHS:
            group.add_argument(spec.flag, dest=spec.dest, default=None,
                               choices=spec.choices or None, help=spec.help.replace("%", "%%"))


def _adding(add: Callable[[Any], None]) -> Callable[..., Any]:
    """Wrap a function that builds a parser so that the parser gets additional flags.

    fairseq <= 0.12.3 has no other way to add flags to a command.
    """
    def make(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        parser = original(*args, **kwargs)
        add(args[0] if parser is None else parser)
        return parser

    return make


@patch
def more_flags() -> None:
    """Add flags to the commands of fairseq. See `_adding`.

    During evaluation, fairseq reads the model's settings from the checkpoint. The placement of
    experts depends on the machine. Flags of the evaluation command therefore set the placement.
    """
    for name, add in (("get_parser", _for_all), ("get_training_parser", _for_training),
                      ("get_validation_parser", _for_training),
                      ("add_common_eval_args", _for_scores),
                      ("get_validation_parser", _for_evaluation),
                      ("get_eval_lm_parser", _for_evaluation),
                      ("get_generation_parser", _for_evaluation)):
        replace(f"options.{name}", _adding(add))


def place_experts(state: dict[str, Any]) -> str | None:
    """Copy the placement flags of the current command into the model settings of a checkpoint.

    Returns: the value of `--moe-experts-on`, or None if the flag is not used.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    _for_evaluation(parser)
    values, _ = parser.parse_known_args(sys.argv[1:])
    flags = {name: value for name, value in vars(values).items() if value is not None}
    settings: Any = (state.get("cfg") or {}).get("model") or state.get("args")
    if flags and isinstance(settings, argparse.Namespace):
        vars(settings).update(flags)
    elif flags:
        from omegaconf import open_dict

        with open_dict(settings):  # checkpoints of older releases lack these settings
            settings.update(flags)
    return flags.get("moe_experts_on")


class CommandParser(Parser):
    """A parser whose error messages tell the user if `--user-dir` is missing."""

    def flags(self) -> set[str]:
        """Return all flags, including the flags that the user directory would add."""
        return super().flags() | self._brought()

    def remedies(self, message: str) -> list[str]:
        """Return advice on how to fix the error that a message describes. See `Parser`."""
        brought, known = self._brought(), super().flags()
        if brought and (_OURS in message or any(
                name in brought or (set(similar_names(name, brought))
                                    & set(similar_names(name, known | brought)))
                for name in flag_names(self.given) if name not in known)):
            message = (f"{_USER_DIR} moe_plugin is missing, which adds the MoE models and their "
                       "flags")
            return [*super().remedies(""), message]
        return super().remedies(message)

    def _brought(self) -> set[str]:
        # the flags that --user-dir would add; the import is slow, but the command fails anyway
        if _USER_DIR in flag_names(self.given):
            return set()
        from moe_plugin.hosts.fairseq import options

        return {"--" + name.replace("_", "-") for cls in options.KINDS
                for name in cls.__dataclass_fields__}


@patch
def short_errors() -> None:
    """Replace fairseq's argument parser with a parser that prints short error messages.

    Before each error message, fairseq <= 0.12.3 prints 300 lines of usage on every rank.
    Furthermore, fairseq <= 0.12.3 does not suggest flags with similar names.
    """
    from fairseq import options

    options.argparse = Overlay(argparse, ArgumentParser=CommandParser)


@replaces("options.get_parser")
def short_errors_of_user_dirs(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Report errors in the user directory in one line. In fairseq <= 0.12.3, the replaced function
    imports the user directory.
    """
    with errors_of_use_in_one_line():
        return original(*args, **kwargs)


def _in_file(words: list[str]) -> list[str]:
    """Convert fairseq's arguments in the `--moe-config` file to command-line arguments for
    fairseq's parser.

    fairseq's arguments in this file are the width of the layers (`model_dim`), and all names in the
    section `fairseq`, which maps names to values.
    """
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    finder.add_argument(CONFIG_FLAG.flag)
    finder.add_argument("--arch", "-a")
    args, _ = finder.parse_known_args(words)
    if not args.moe_config:
        return []
    values = read_yaml(args.moe_config)
    section = {name.replace("_", "-"): value for name, value in host_section(
        values, args.moe_config, _SECTION, "fairseq").items()}
    ours = {spec.flag.removeprefix("--"): spec.path for spec in flag_specs()}
    for name in ours.keys() & section.keys():
        raise ValueError(f"config file {short(args.moe_config)}: {_SECTION}.{name} is a setting "
                         f"of moe-plugin. Outside of the section {_SECTION}, write it as "
                         f"{ours[name] or 'a flag'}")
    arch = args.arch or section.get("arch")
    if isinstance(width := values.get("model_dim"), int) and width:
        section = {**({"encoder-embed-dim": width} if _translates(arch) else {}),
                   "decoder-embed-dim": width, **section}
    return [f"--{name}" if value is True else f"--{name}={value}"
            for name, value in section.items() if value not in (False, None)]


def _translates(arch: str | None) -> bool:
    from fairseq.models import ARCH_MODEL_REGISTRY
    from fairseq.models.transformer import TransformerModel

    return issubclass(ARCH_MODEL_REGISTRY.get(arch, object), TransformerModel)


@replaces("options.parse_args_and_arch")
def settings_checked_when_parsed(original: Callable[..., Any], parser: Any, *args: Any,
                                 **kwargs: Any) -> Any:
    """Check MoE settings when the command line is parsed, before fairseq starts to log.

    fairseq <= 0.12.3 parses MoE settings as strings and does not check them. The `--moe-config`
    file can also contain arguments of fairseq (see `_in_file`).
    """
    given = args[0] if args else kwargs.get("input_args")
    given = list(sys.argv[1:] if given is None else given)
    with errors_of_use_in_one_line():
        words = _in_file(given)
    if words:
        args, kwargs["input_args"] = args[1:], [*words, *given]
    parsed = original(parser, *args, **kwargs)
    namespace = parsed[0] if isinstance(parsed, tuple) else parsed
    if "moe_plugin.hosts.fairseq.registered" in sys.modules:  # the user directory is loaded
        from moe_plugin.hosts.fairseq.translate import check_flags

        try:
            passed = {*flag_names(words), *flag_names(given)}
            check_flags(namespace, {action.dest for action in parser._actions
                                    if passed.intersection(action.option_strings)})
        except ValueError as error:
            parser.error(as_given(str(error), vars(namespace)))
    return parsed


_FOLDER = ("--config-dir", "-cd")
_FULL = "HYDRA_FULL_ERROR"


@patch
def hydra_sees_fields() -> None:
    """Register fairseq's dataclasses with Hydra again, with the fields that this package adds.

    fairseq registers its dataclasses when it is imported, before the fields are added.
    """
    from fairseq.dataclass.initialize import hydra_init

    hydra_init()


@patch
def settings_by_hydra() -> None:
    """Report invalid settings in one line. Make `--config-dir configs/fairseq` work in any folder.

    If settings are invalid, fairseq <= 0.12.3 exits with status 1 and prints a message of hydra or
    a traceback. fairseq <= 0.12.3 searches for `configs/fairseq` only in the current folder.
    """
    from fairseq.dataclass import initialize

    original = initialize.hydra_init

    def hydra_init(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        caller = sys._getframe(1).f_globals
        if "hydra_main" in caller:  # the caller is the command, which calls hydra_main next
            sys.argv[1:] = _with_bundled(sys.argv[1:])
            name = str(args[0] if args else "config")
            search_bundled_groups(name)
            caller["hydra_main"] = _short(caller["hydra_main"], name)

    initialize.hydra_init = hydra_init


def _with_bundled(words: list[str]) -> list[str]:
    """Replace the path of a settings folder that does not exist with the path of the settings
    folder that is installed with this package.
    """
    replaced = list(words)
    for i, word in enumerate(words):
        flag, _, value = word.partition("=")
        if flag in _FOLDER and value:
            replaced[i] = f"{flag}={bundled(value)}"
        elif flag in _FOLDER and i + 1 < len(words):
            replaced[i + 1] = str(bundled(words[i + 1]))
    return replaced


def _check_name(name: str) -> None:
    """Raise a `ValueError` if the settings folder has no file with this name. Without this check,
    fairseq would silently train with its default settings.
    """
    import fairseq
    from hydra._internal.utils import get_args

    here = [get_args().config_dir, os.path.join(os.path.dirname(fairseq.__file__), "config")]
    files = [(folder, file.removesuffix(".yaml")) for folder in here
             if folder and os.path.isdir(folder) for file in sorted(os.listdir(folder))]
    if not any(os.path.exists(os.path.join(folder, f"{name.removesuffix('.yaml')}.yaml"))
               for folder in here if folder):
        known = [file for _, file in files]
        raise ValueError(f"--config-name {short(name)} is not in {', '.join(filter(None, here))}; "
                         f"{did_you_mean(similar_names(name, known))}use the name of a file in "
                         "this folder")


def _short(main: Callable[..., Any], name: str) -> Callable[..., Any]:
    from hydra._internal.utils import run_and_report
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    @functools.wraps(main)
    def hydra_main(*args: Any, **kwargs: Any) -> Any:
        whole = os.environ.get(_FULL) == "1"
        try:
            with _raised():
                _check_name(name)
                return main(*args, **kwargs)
        except Exception as error:
            if whole:
                raise
            caught = error
        if isinstance(caught, (HydraException, OmegaConfBaseException)) or is_ours(caught):
            if os.environ.get("LOCAL_RANK", "0") == "0":
                sys.stderr.write(f"{os.path.basename(sys.argv[0])}: error: {_text(caught)}\n")
            raise SystemExit(STATUS_OF_USE) from None
        # hydra hides its own frames, which it finds only at the beginning of the traceback
        return run_and_report(functools.partial(_raise, caught.with_traceback(_of_job(caught))))

    return hydra_main


@contextmanager
def _raised() -> Iterator[None]:
    """Make hydra raise errors instead of printing them."""
    before = os.environ.get(_FULL)
    os.environ[_FULL] = "1"
    try:
        yield
    finally:
        os.environ.pop(_FULL)
        if before is not None:
            os.environ[_FULL] = before


def _of_job(error: BaseException) -> TracebackType | None:
    at = error.__traceback__
    while at is not None and at.tb_frame.f_code.co_name != "run_job":
        at = at.tb_next
    return at or error.__traceback__


def _raise(error: Exception) -> None:
    raise error


def _text(error: BaseException) -> str:
    text = short(error, 600)
    if error.__cause__ is not None and not is_ours(error):
        text += f": {short(error.__cause__, 600)}"
    return text + _near(text)


def _near(text: str) -> str:
    """Return this package's error message for an MoE setting that hydra does not know."""
    from moe_plugin.config.tree import unread

    match = re.search(r"full_key: moe\.([\w.]+)", text)
    nested: Any = None
    for name in reversed(match[1].split(".") if match else []):
        nested = {name: nested}
    try:
        unread(nested or {})
    except ValueError as error:
        return f"; {error}" if "unknown key" in str(error) else ""
    return ""
