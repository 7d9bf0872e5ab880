"""Command lines: flags that fairseq's commands do not have (for checkpoints, for where experts lie,
and those of launch scripts of its `moe` branch, so that these run unchanged), and errors of one
line, once on a node, with what to write instead; those of MoE settings before anything is built.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any

from moe_plugin.checkpoint import trust
from moe_plugin.config.flags import CONFIG_FLAG, as_given, flag_specs, setting_specs
from moe_plugin.hosts.fairseq.compat.launch import errors_of_use_in_one_line
from moe_plugin.hosts.fairseq.compat.patching import Overlay, patch, replace, replaces
from moe_plugin.utils.messages import Parser, alike, flag_names, short
from moe_plugin.utils.yaml_file import read_yaml

logger = logging.getLogger(__name__)
_USER_DIR, _SECTION = "--user-dir", "fairseq"
_OURS = "invalid choice: 'moe_"  # how names of our models and criteria begin
# settings that say where experts lie
_PATHS = (*(f"experts.{name}" for name in (
    "store", "cache", "cache_policy", "store_path", "store_throttle")), "router.predict")
# flags of the branch's training scripts that name what fairseq 0.12 does not have
WITHOUT_EFFECT = {
    "--log-nvidia-smi": "accepted; run nvidia-smi next to the training",
    "--use-stable-embedding": "accepted; embeddings are fairseq's own, without a layer norm",
    "--block-wise": "accepted; it is a setting of the branch's 8-bit Adam",
}


class _WithoutEffect(argparse.Action):
    """A flag that is accepted and says that nothing follows from it."""

    def __call__(self, parser: Any, namespace: Any, values: Any,
                 option_string: str | None = None) -> None:
        logger.warning("%s has no effect: %s", option_string, self.help)
        setattr(namespace, self.dest, self.const if self.nargs == 0 else values)


def _for_all(parser: Any) -> None:
    parser.add_argument(
        trust.FLAG, action="store_true",
        help="load checkpoints that hold other classes than fairseq's, which can run code")
    for flag, text in WITHOUT_EFFECT.items():
        parser.add_argument(flag, action=_WithoutEffect, nargs=0, default=False, const=True,
                            help=text)


def _for_training(parser: Any) -> None:
    parser.add_argument(
        "--num-workers-valid", type=int, action=_WithoutEffect,
        help="accepted; validation data takes --num-workers, as training data")


def _for_scores(group: Any) -> None:
    group.add_argument("--is-moe", action="store_true",
                       help="accepted, not needed: the checkpoint says whether it has experts")


def _for_evaluation(parser: Any) -> None:
    group = parser.add_argument_group("where experts lie")
    for spec in setting_specs():
        if spec.path in _PATHS:
            group.add_argument(spec.flag, dest=spec.dest, default=None,
                               choices=spec.choices or None, help=spec.help.replace("%", "%%"))


def _adding(add: Callable[[Any], None]) -> Callable[..., Any]:
    """fairseq <= 0.12.3 has no other place for flags of a command than the functions that make its
    parsers.
    """
    def make(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        add(args[0] if made is None else made)
        return made

    return make


@patch
def more_flags() -> None:
    """See `_adding`. In evaluation fairseq takes a model's settings from the checkpoint; where
    experts lie is a matter of the machine.
    """
    for name, add in (("get_parser", _for_all), ("get_training_parser", _for_training),
                      ("get_validation_parser", _for_training),
                      ("add_common_eval_args", _for_scores),
                      ("get_validation_parser", _for_evaluation),
                      ("get_eval_lm_parser", _for_evaluation),
                      ("get_generation_parser", _for_evaluation)):
        replace(f"options.{name}", _adding(add))


def place_experts(state: dict[str, Any]) -> str | None:
    """Put this command's flags for experts into the settings of a checkpoint's model; the value of
    `--moe-experts-on`.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    _for_evaluation(parser)
    values, _ = parser.parse_known_args(sys.argv[1:])
    flags = {name: value for name, value in vars(values).items() if value is not None}
    found = (state.get("cfg") or {}).get("model") or state.get("args")
    if flags and isinstance(found, argparse.Namespace):
        vars(found).update(flags)
    elif flags:
        from omegaconf import open_dict

        with open_dict(found):  # checkpoints of older releases have no such settings
            found.update(flags)
    return flags.get("moe_experts_on")


class CommandParser(Parser):
    """A parser whose errors name the user dir where it is missing."""

    def flags(self) -> set[str]:
        """Every flag, with those that the user dir would bring."""
        return super().flags() | self._brought()

    def remedies(self, message: str) -> list[str]:
        """As `Parser`'s."""
        brought, known = self._brought(), super().flags()
        if brought and (_OURS in message or any(
                name in brought or set(alike(name, brought)) & set(alike(name, known | brought))
                for name in flag_names(self.given) if name not in known)):
            message = f"{_USER_DIR} moe_plugin is missing, which brings MoE models and their flags"
            return [*super().remedies(""), message]
        return super().remedies(message)

    def _brought(self) -> set[str]:
        # flags, where the user dir is not given: then all is lost, and imports may take their time
        if _USER_DIR in flag_names(self.given):
            return set()
        from moe_plugin.hosts.fairseq import options

        return {"--" + name.replace("_", "-") for kind in options.KINDS
                for name in kind.__dataclass_fields__}


@patch
def short_errors() -> None:
    """fairseq <= 0.12.3 writes 300 lines of usage before the message, on every rank, and names no
    near flag.
    """
    from fairseq import options

    options.argparse = Overlay(argparse, ArgumentParser=CommandParser)


@replaces("options.get_parser")
def short_errors_of_user_dirs(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """fairseq <= 0.12.3 imports the user dir there."""
    with errors_of_use_in_one_line():
        return original(*args, **kwargs)


def _in_file(words: list[str]) -> list[str]:
    """What the file of `--moe-config` on a command line says of fairseq's arguments, as words for
    its parser: the width of layers by `model_dim`, and the section `fairseq`, from names to values.
    """
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    finder.add_argument(CONFIG_FLAG.flag)
    finder.add_argument("--arch", "-a")
    found, _ = finder.parse_known_args(words)
    if not found.moe_config:
        return []
    values = read_yaml(found.moe_config)
    section = values.get(_SECTION) or {}
    if not isinstance(section, Mapping):
        raise ValueError(f"config file {short(found.moe_config)}: {_SECTION}={short(section)} must "
                         "be a mapping of fairseq's arguments to values; write one below the other")
    section = {str(name).replace("_", "-"): value for name, value in section.items()}
    ours = {spec.flag.removeprefix("--"): spec.path for spec in flag_specs()}
    for name in ours.keys() & section.keys():
        raise ValueError(f"config file {short(found.moe_config)}: {_SECTION}.{name} is a setting "
                         f"of moe-plugin: write it as {ours[name] or 'a flag'} beside the section "
                         f"{_SECTION}")
    arch = found.arch or section.get("arch")
    if isinstance(width := values.get("model_dim"), int) and width:
        section = {**({"encoder-embed-dim": width} if _translates(arch) else {}),
                   "decoder-embed-dim": width, **section}
    return [f"--{name}" if value is True else f"--{name}={value}"
            for name, value in section.items() if value not in (False, None)]


def _translates(arch: str | None) -> bool:
    """Whether an architecture has an encoder."""
    from fairseq.models import ARCH_MODEL_REGISTRY
    from fairseq.models.transformer import TransformerModel

    return issubclass(ARCH_MODEL_REGISTRY.get(arch, object), TransformerModel)


@replaces("options.parse_args_and_arch")
def settings_checked_when_parsed(original: Callable[..., Any], parser: Any, *args: Any,
                                 **kwargs: Any) -> Any:
    """fairseq <= 0.12.3 parses MoE settings as texts: whether they fit is said before its log
    begins. The file of `--moe-config` may hold fairseq's arguments, too (`_in_file`).
    """
    given = args[0] if args else kwargs.get("input_args")
    given = list(sys.argv[1:] if given is None else given)
    with errors_of_use_in_one_line():
        words = _in_file(given)
    if words:
        args, kwargs["input_args"] = args[1:], [*words, *given]
    parsed = original(parser, *args, **kwargs)
    namespace = parsed[0] if isinstance(parsed, tuple) else parsed
    if "moe_plugin.hosts.fairseq.registered" in sys.modules:  # the user dir is there
        from moe_plugin.checkpoint.formats.fairseq.translate import check_flags

        try:
            check_flags(namespace)
        except ValueError as error:
            parser.error(as_given(str(error), vars(namespace)))
    return parsed
