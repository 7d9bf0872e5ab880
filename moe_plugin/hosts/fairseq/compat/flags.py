"""Flags that fairseq's commands do not have: for checkpoints, for where experts lie, and those of
launch scripts of its `moe` branch, so that these run unchanged.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable
from typing import Any

from moe_plugin.checkpoint import trust
from moe_plugin.config.flags import FlagSpec, setting_specs

logger = logging.getLogger(__name__)
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
    for spec in _specs():
        group.add_argument(spec.flag, dest=spec.dest, default=None,
                           choices=spec.choices or None, help=spec.help.replace("%", "%%"))


def _specs() -> list[FlagSpec]:
    return [spec for spec in setting_specs() if spec.path in _PATHS]


def more_flags() -> None:
    """fairseq <= 0.12.3 has no other place for flags of a command than the functions that make its
    parsers. In evaluation it takes a model's settings from the checkpoint; where experts lie is a
    matter of the machine.
    """
    from fairseq import options

    of_evaluation = ("get_validation_parser", "get_eval_lm_parser", "get_generation_parser")
    for name, add in (("get_parser", _for_all), ("get_training_parser", _for_training),
                      ("get_validation_parser", _for_training),
                      ("add_common_eval_args", _for_scores),
                      *((name, _for_evaluation) for name in of_evaluation)):
        setattr(options, name, _adding(add, getattr(options, name)))  # names of the line above


def _adding(add: Callable[[Any], None], original: Callable[..., Any]) -> Callable[..., Any]:
    def make(*args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        add(args[0] if made is None else made)
        return made

    return make


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


SHIMS: tuple[Callable[[], None], ...] = (more_flags,)
