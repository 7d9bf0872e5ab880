"""The one reader of YAML files: OmegaConf's dialect, as under Hydra."""

from __future__ import annotations

import importlib
import io
from pathlib import Path
from typing import Any

from moe_plugin.utils.messages import short
from moe_plugin.utils.regular_files import check_input

# more than any file of settings needs: characters, nested brackets, values once aliases stand for
# what they name
MAX_CHARACTERS, MAX_DEPTH, MAX_VALUES = 4_000_000, 50, 1_000_000
_NAMES = {dict: "mapping", list: "list"}


def bundled(path: str | Path) -> str | Path:
    """`path`, or, where it begins with `configs/` and nothing is there, the example file (or folder
    of them) of this name that is installed with the package.
    """
    wanted = Path(path)
    if wanted.parts[:1] != ("configs",) or ".." in wanted.parts or wanted.exists():
        return path
    [folder] = importlib.import_module("moe_plugin.configs").__path__
    place = Path(folder, *wanted.parts[1:])
    return place if place.exists() else path


def read_yaml(path: str | Path, what: str = "config file",
              remedy: str = "see configs/ for examples", kind: type = dict) -> Any:
    """The mapping (or list) in a YAML file as plain containers; an empty file is an empty mapping.

    `1e-3` is a number, dates are text, and `${...}` is an error: no value comes from elsewhere.

    Args:
        path: the file; see `bundled`.
        what: what errors call the file.
        remedy: what errors recommend.
        kind: expected type of the content, dict or list.
    Raises:
        ValueError: the file cannot be read, is not YAML, names a key twice, uses an interpolation,
            or holds another type.
    """
    from omegaconf import OmegaConf  # slow to import, and many programs read no YAML
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    where, path = f"{what} {short(str(path))}", bundled(path)
    check_input(path, what, remedy)
    try:
        with open(path, encoding="utf-8") as stream:
            text = stream.read(MAX_CHARACTERS + 1)
        _check_size(text)
        values = OmegaConf.to_container(OmegaConf.load(io.StringIO(text)))
        interpolated = "${" in str(values)
    # PyYAML's constructors raise what Python does: `!!int ""`, `!!timestamp x`, nested brackets;
    # OmegaConf asserts: 'true'
    except (YAMLError, OmegaConfBaseException, ValueError, LookupError, TypeError, AttributeError,
            RecursionError, ArithmeticError, AssertionError) as error:
        raise ValueError(f"{where} is not YAML: {short(error)}; {remedy}") from error
    except OSError as error:  # OmegaConf raises one for a single number
        reason = error.strerror or error
        raise ValueError(f"{where} cannot be read ({reason}); {remedy}") from error
    if not isinstance(values, kind):
        raise ValueError(f"{where} holds a {type(values).__name__}, not a {_NAMES[kind]}; {remedy}")
    if interpolated:
        raise ValueError(f"{where} uses an interpolation ${{...}}; write the value in its place")
    return values


def _check_size(text: str) -> None:
    """`ValueError` where a text would become too much: a few aliases can multiply to any size."""
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"more than {MAX_CHARACTERS} characters")
    import yaml

    scanner = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
    named: dict[str, int] = {}  # values below each anchor
    open_values: list[tuple[str | None, int]] = []  # anchor and values so far of each open bracket
    for event in yaml.parse(text, Loader=scanner):
        if isinstance(event, yaml.CollectionStartEvent):
            open_values.append((event.anchor, 0))
            if len(open_values) > MAX_DEPTH:
                raise ValueError(f"more than {MAX_DEPTH} nested brackets")
            continue
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, values = open_values.pop()
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor not in named:
                raise ValueError(f"*{event.anchor} stands for nothing before it")
            anchor, values = None, named[event.anchor]
        elif isinstance(event, yaml.ScalarEvent):
            anchor, values = event.anchor, 0
        else:
            continue
        values += 1
        if anchor is not None:
            named[anchor] = values
        if open_values:
            outer, before = open_values[-1]
            open_values[-1] = outer, before + values
            if before + values > MAX_VALUES:
                raise ValueError(f"more than {MAX_VALUES} values; write aliases (*name) out")
