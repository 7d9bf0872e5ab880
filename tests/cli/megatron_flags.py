"""Words of a command, read by the parser of Megatron's own training script with our flags."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from moe_plugin.utils.messages import Parser


def read(words: list[str]) -> dict[str, Any]:
    """The arguments by name; `AssertionError` if one is unknown."""
    pytest.importorskip("megatron.core", reason="needs megatron-core")
    if importlib.util.find_spec("megatron.training") is None:
        pytest.skip("needs megatron-core 0.17 or newer")
    from tests.hosts.megatron.ranks import server

    done = server.run(1, _read, words)
    assert done.code == 0, done.log
    return done.results[0]


def _read(words: list[str]) -> dict[str, Any]:
    from megatron.training.arguments import add_megatron_arguments

    from moe_plugin.hosts.megatron.launch import extra_args_provider

    parser = extra_args_provider(add_megatron_arguments(Parser(allow_abbrev=False)))
    del parser.parse_known_args  # which reads the file of --moe-config; here none need be
    return {name: value for name, value in vars(parser.parse_args(words)).items()
            if isinstance(value, (bool, int, float, str, list, type(None)))}
