"""The one reader of YAML files: OmegaConf's dialect, as under Hydra."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

_NAMES = {dict: "mapping", list: "list"}


def read_yaml(path: str | Path, what: str = "config file",
              remedy: str = "see configs/ for examples", kind: type = dict) -> Any:
    """The mapping (or list) in a YAML file as plain containers; an empty file is an empty mapping.

    `1e-3` is a number, dates are text, and `${...}` is an error: no value comes from elsewhere.

    Args:
        path: the file.
        what: what errors call the file.
        remedy: what errors recommend.
        kind: expected type of the content, dict or list.
    Raises:
        ValueError: the file cannot be read, is not YAML, names a key twice, uses an interpolation,
            or holds another type.
    """
    where = f"{what} {str(path)!r}"
    try:
        with open(path, encoding="utf-8") as stream:
            values = OmegaConf.to_container(OmegaConf.load(stream))
    except (YAMLError, UnicodeDecodeError, OmegaConfBaseException) as error:
        raise ValueError(f"{where} is not YAML: {error}; {remedy}") from error
    except OSError as error:  # OmegaConf raises one for a single number
        reason = error.strerror or error
        raise ValueError(f"{where} cannot be read ({reason}); {remedy}") from error
    if not isinstance(values, kind):
        raise ValueError(f"{where} holds a {type(values).__name__}, not a {_NAMES[kind]}; {remedy}")
    if "${" in str(values):
        raise ValueError(f"{where} uses an interpolation ${{...}}; write the value in its place")
    return values
