"""Imported once by the server that forks fairseq's ranks (tests/preloaded.py)."""

import argparse
import copy
import functools
import importlib
import os
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser

os.environ["TORCHDYNAMO_DISABLE"] = "1"

for tool in ("eval_lm", "generate", "hydra_train", "preprocess", "train", "validate"):
    importlib.import_module(f"fairseq_cli.{tool}")
importlib.import_module("torch._dynamo")  # 2 s; the first optimizer imports it
utils = importlib.import_module("fairseq.utils")
utils.import_user_module(argparse.Namespace(user_dir="moe_plugin"))


def _parse_each_override_once() -> None:
    """fairseq hands hydra 400 settings as text; most are the same in every run, and to parse them
    takes a fifth of a small run.
    """
    from fairseq import options
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    parse = functools.cache(OverridesParser.create().parse_rule)

    def parse_rule(_: OverridesParser, text: str, rule: str) -> Any:
        return copy.copy(parse(text, rule))

    OverridesParser.parse_rule = parse_rule
    words = ["data", "--task", "language_modeling", "--arch", "transformer_lm"]
    convert_namespace_to_omegaconf(
        options.parse_args_and_arch(options.get_training_parser(), words))


_parse_each_override_once()
