"""Imported once by the server that forks fairseq's ranks (tests/preloaded.py)."""

import argparse
import atexit
import contextlib
import copy
import functools
import hashlib
import importlib
import os
import pickle
import shutil
import tempfile
from pathlib import Path
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser

os.environ["TORCHDYNAMO_DISABLE"] = "1"

for tool in ("eval_lm", "generate", "hydra_train", "preprocess", "train", "validate"):
    importlib.import_module(f"fairseq_cli.{tool}")
for module in ("torch._dynamo", "torch.profiler._cupti_monitor",  # the first optimizer imports them
               "fairseq.data.data_utils_fast", "fairseq.data.token_block_utils_fast"):
    with contextlib.suppress(ImportError):
        importlib.import_module(module)
utils = importlib.import_module("fairseq.utils")
utils.import_user_module(argparse.Namespace(user_dir="moe_plugin"))
constants = importlib.import_module("fairseq.dataclass.constants")


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


# fairseq's enumerations have no name by which pickle finds them; all ranks forked from this process
# have them in the same place
ENUMS = {id(each): each for each in constants.StrEnum.__subclasses__()}


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> int | None:
        return id(obj) if id(obj) in ENUMS else None


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, pid: int) -> type:
        return ENUMS[pid]


def _compose_alike_settings_once() -> None:
    """Of the settings of a run a few differ from those of an earlier one. hydra composes all in 0.6
    s, half of a small run: what an earlier rank composed lies in a file, where the settings that
    differ are changed.
    """
    utils = importlib.import_module("fairseq.dataclass.utils")
    whole, folder, server = utils.compose, tempfile.mkdtemp(), os.getpid()
    atexit.register(lambda: os.getpid() != server or shutil.rmtree(folder, ignore_errors=True))

    def compose(name: str, overrides: list[str], strict: bool) -> Any:
        keys = [text.split("=", 1)[0] for text in overrides]
        groups = [text for text, key in zip(overrides, keys, strict=True) if "." not in key]
        path = Path(folder, hashlib.sha256(repr((name, sorted(keys), sorted(groups))).encode())
                    .hexdigest())
        with contextlib.suppress(Exception):  # it is said by hydra itself below
            with open(path, "rb") as file:
                known, composed = _Unpickler(file).load()
            others = OverridesParser.create().parse_overrides(
                [text for text in overrides if text not in known])
            if not any(isinstance(other.value(), dict) for other in others):  # it would be merged
                ConfigLoaderImpl._apply_overrides_to_config(others, composed)
                return composed
        composed = whole(name, overrides=overrides, strict=strict)
        new = path.with_suffix(f".{os.getpid()}")
        with open(new, "wb") as file:
            _Pickler(file).dump((frozenset(overrides), composed))
        new.replace(path)
        return composed

    utils.compose = compose


_compose_alike_settings_once()
_parse_each_override_once()
