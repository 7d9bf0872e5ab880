"""YAML files as Hydra reads them: `1e-3` is a number, and a key that comes twice is an error."""

from __future__ import annotations

import re
from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    """PyYAML follows YAML 1.1: there `1e-3` is text, and of two equal keys the last one silently
    wins.
    """

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        "while reading a mapping", node.start_mark,
                        f"key {key.value!r} comes twice", key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver("tag:yaml.org,2002:float",
                              re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
                              list("-+0123456789"))


def read_yaml(path: str) -> dict[str, Any]:
    """The mapping in a YAML file; an empty file is an empty mapping.

    Raises:
        ValueError: the file cannot be read, is no YAML, names a key twice, or holds something else
            than a mapping.
    """
    try:
        with open(path, encoding="utf-8") as stream:
            values = yaml.load(stream, Loader=_Loader)  # noqa: S506 - a SafeLoader
    except OSError as error:
        raise ValueError(
            f"config file {path!r} cannot be read ({error.strerror}); give the path of a YAML file"
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(
            f"config file {path!r} is not YAML: {error}; see configs/ for examples") from error
    if values is not None and not isinstance(values, dict):
        raise ValueError(
            f"config file {path!r} holds a {type(values).__name__}, not a mapping; see configs/ "
            "for examples"
        )
    return values or {}
