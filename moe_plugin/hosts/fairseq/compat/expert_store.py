"""`--moe-experts-on` and what belongs to it, in the commands that evaluate."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

from moe_plugin.config.flags import FlagSpec, setting_specs

_PATHS = (*(f"experts.{name}" for name in (
    "store", "cache", "cache_policy", "store_path", "store_throttle")), "router.predict")


def _specs() -> list[FlagSpec]:
    return [spec for spec in setting_specs() if spec.path in _PATHS]


def _add(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("where experts lie")
    for spec in _specs():
        group.add_argument(spec.flag, dest=spec.dest, default=None,
                           choices=spec.choices or None, help=spec.help.replace("%", "%%"))


def evaluation_flags() -> None:
    """fairseq's evaluation takes a model's settings from the checkpoint; where experts lie is a
    matter of the machine, and has flags.
    """
    from fairseq import options

    for name in ("get_validation_parser", "get_eval_lm_parser", "get_generation_parser"):
        setattr(options, name, _with_flags(getattr(options, name)))


def _with_flags(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_parser(*args: Any, **kwargs: Any) -> Any:
        parser = original(*args, **kwargs)
        _add(parser)
        return parser

    return get_parser


def given() -> dict[str, str]:
    """The flags of this command, as texts by `dest`."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    _add(parser)
    values, _ = parser.parse_known_args(sys.argv[1:])
    return {name: value for name, value in vars(values).items() if value is not None}


def place_experts(state: dict[str, Any]) -> str | None:
    """Put the flags of this command into the settings of a checkpoint's model; the value of
    `--moe-experts-on`.
    """
    flags = given()
    where = flags.get("moe_experts_on")
    if not flags:
        return where
    found = (state.get("cfg") or {}).get("model") or state.get("args")
    if isinstance(found, argparse.Namespace):
        vars(found).update(flags)
        return where
    from omegaconf import open_dict

    with open_dict(found):  # checkpoints of older releases have no such settings
        found.update(flags)
    return where


SHIMS: tuple[Callable[[], None], ...] = (evaluation_flags,)
