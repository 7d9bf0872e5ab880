"""Flags of fairseq's `moe` branch that nothing has to follow from, so that its launch scripts run
unchanged.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)


def is_moe_flag() -> None:
    """Accept `--is-moe`, which launch scripts of fairseq's `moe` branch pass to evaluation.

    Here the files say it themselves.
    """
    from fairseq import options

    original = options.add_common_eval_args

    def add_common_eval_args(group: Any) -> None:
        original(group)
        group.add_argument(
            "--is-moe", action="store_true",
            help="accepted, not needed: the checkpoint says whether it has experts")

    options.add_common_eval_args = add_common_eval_args


class _WithoutEffect(argparse.Action):
    """A flag that is accepted and says that nothing follows from it."""

    def __call__(self, parser: Any, namespace: Any, values: Any,
                 option_string: str | None = None) -> None:
        logger.warning("%s has no effect: %s", option_string, self.help)
        setattr(namespace, self.dest, self.const if self.nargs == 0 else values)


# flags of the branch's training scripts that name what fairseq 0.12 does not have
WITHOUT_EFFECT = {
    "--log-nvidia-smi": "accepted; run nvidia-smi next to the training",
    "--use-stable-embedding": "accepted; embeddings are fairseq's own, without a layer norm",
    "--block-wise": "accepted; it is a setting of the branch's 8-bit Adam",
}


def flags_without_effect() -> None:
    """Launch scripts of fairseq's `moe` branch pass the flags of `WITHOUT_EFFECT`."""
    from fairseq import options

    original = options.get_parser

    def get_parser(*args: Any, **kwargs: Any) -> Any:
        parser = original(*args, **kwargs)
        for flag, text in WITHOUT_EFFECT.items():
            parser.add_argument(flag, action=_WithoutEffect, nargs=0, default=False, const=True,
                                help=text)
        return parser

    options.get_parser = get_parser


def num_workers_valid_flag() -> None:
    """Accept `--num-workers-valid` of launch scripts of fairseq's `moe` branch.

    fairseq 0.12 reads validation data with `--num-workers`.
    """
    from fairseq import options

    original = options.add_dataset_args

    def add_dataset_args(parser: Any, train: bool = False, gen: bool = False) -> Any:
        group = original(parser, train, gen)
        if train:
            group.add_argument(
                "--num-workers-valid", type=int, action=_WithoutEffect,
                help="accepted; validation data takes --num-workers, as training data")
        return group

    options.add_dataset_args = add_dataset_args


SHIMS: tuple[Callable[[], None],
             ...] = (is_moe_flag, flags_without_effect, num_workers_valid_flag)
