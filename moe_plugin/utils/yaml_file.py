"""Read YAML files. Like Hydra, this module uses the YAML dialect of OmegaConf."""

from __future__ import annotations

import importlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_plugin.utils.messages import short
from moe_plugin.utils.regular_files import check_input

# Limits far above any settings file: characters, nested brackets, and values after aliases are
# expanded.
MAX_CHARACTERS, MAX_DEPTH, MAX_VALUES = 4_000_000, 50, 1_000_000
_NAMES: dict[type, str] = {dict: "mapping", list: "list"}


def bundled(path: str | Path) -> str | Path:
    """If `path` begins with `configs/` and does not exist, return the path of the example file in
    this package, if there is one.

    In all other cases, return `path` unchanged.
    """
    wanted = Path(path)
    if wanted.parts[:1] != ("configs",) or ".." in wanted.parts or wanted.exists():
        return path
    example = Path(bundled_folder(), *wanted.parts[1:])
    return example if example.exists() else path


def bundled_folder() -> str:
    """Return the path of the folder `configs` in this package."""
    [folder] = importlib.import_module("moe_plugin.configs").__path__
    return str(folder)


def inline(values: Mapping[str, Any]) -> str:
    """Return settings as text that `read_yaml` accepts in place of a path.

    A host whose own settings contain a section of MoE settings (the group `moe` of Hydra) passes
    the section on as this text, so that the section is read exactly like a file.

    Args:
        values: nested values, or values by dotted path.
    """
    import yaml

    return str(yaml.safe_dump(dict(values), default_flow_style=True, sort_keys=False,
                              width=MAX_CHARACTERS)).strip()


def source_of(path: str | Path, what: str = "") -> str:
    """Return how messages name the source of settings: `what` and the path of a file, or the group
    `moe` for the text of `inline`.
    """
    return "the group moe" if _is_inline(path) else f"{what} {short(str(path))}".strip()


def _is_inline(path: str | Path) -> bool:
    return str(path).startswith("{")


def read_yaml(path: str | Path, what: str = "config file",
              remedy: str = "see configs/ for examples", kind: type = dict) -> Any:
    """Read a mapping or a list from a YAML file. An empty file is read as an empty mapping.

    The text `1e-3` is read as a number, and dates are read as strings. Interpolations `${...}` are
    not allowed, because values must not come from outside the file.

    Args:
        path: path of the file (see `bundled`), or the text of `inline`.
        what: description of the file, for error messages.
        remedy: what the user can do, for error messages.
        kind: expected type of the data, dict or list.
    Raises:
        ValueError: If the file cannot be read, is not YAML, contains a key twice, uses an
            interpolation, or contains data of another type.
    """
    from omegaconf import OmegaConf  # slow to import; many programs read no YAML
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    where, path = source_of(path, what), bundled(path)
    if not _is_inline(path):
        check_input(path, what, remedy)
    try:
        with io.StringIO(str(path)) if _is_inline(path) else open(path, encoding="utf-8") as stream:
            text = stream.read(MAX_CHARACTERS + 1)
        _check_size(text)
        values = OmegaConf.to_container(OmegaConf.load(io.StringIO(text)))
        interpolated = "${" in str(values)
    # PyYAML's constructors raise Python's own errors, e.g. for `!!int ""`, `!!timestamp x` and deep
    # nesting. OmegaConf raises an AssertionError for a document such as `true`.
    except (YAMLError, OmegaConfBaseException, ValueError, LookupError, TypeError, AttributeError,
            RecursionError, ArithmeticError, AssertionError) as error:
        raise ValueError(f"{where} is not YAML: {short(error)}; {remedy}") from error
    except OSError as error:  # OmegaConf raises one for a single number
        reason = error.strerror or error
        raise ValueError(f"{where} cannot be read ({reason}); {remedy}") from error
    if not isinstance(values, kind):
        raise ValueError(f"{where} contains a {type(values).__name__}, not a {_NAMES[kind]}; "
                         f"{remedy}")
    if interpolated:
        raise ValueError(f"{where} uses an interpolation ${{...}}; replace it with the value")
    return values


def host_section(values: Mapping[str, Any], path: str, name: str, host: str) -> dict[str, Any]:
    """Return the section of a settings file with a host's own arguments, by name as written.

    Raises:
        ValueError: If the section is not a mapping.
    """
    section = values.get(name) or {}
    if not isinstance(section, Mapping):
        raise ValueError(f"config file {short(path)}: {name}={short(section)} must be a mapping of "
                         f"{host}'s arguments to values. Write one argument per line.")
    return {str(argument): value for argument, value in section.items()}


def _check_size(text: str) -> None:
    """Raise a `ValueError` if a YAML text is too large, or would be too large after its aliases are
    expanded. A few aliases are enough to create data of any size.
    """
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"more than {MAX_CHARACTERS} characters")
    import yaml

    scanner = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
    named: dict[str, int] = {}  # number of values below each anchor
    open_values: list[tuple[str | None, int]] = []  # anchor and number of values of open brackets
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
                raise ValueError(f"the alias *{event.anchor} has no anchor before it")
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
                raise ValueError(f"more than {MAX_VALUES} values; write out the aliases (*name)")
