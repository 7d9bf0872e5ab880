"""What the user of a run chose otherwise than the defaults, as written."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from moe_plugin.config.flags import CONFIG_FLAG
from moe_plugin.config.tree import flatten, from_dict, run_from_dict, to_dict
from moe_plugin.observe.history.command import written
from moe_plugin.observe.history.records import comparable
from moe_plugin.utils.yaml_file import read_yaml

ON, OFF = "on", "off"  # of a switch, which has no value


def chosen(words: Iterable[str], known: Mapping[str, tuple[str, str]],
           several: Collection[str] = ()) -> dict[str, tuple[str, str]]:
    """What a command and the file of its `--moe-config` say otherwise than the defaults: (as
    written, default) by name.

    Args:
        known: (value, default) by flag, of the host's settings that differ from their defaults; a
            switch is `ON`, `OFF`.
        several: see `written`.
    """
    found = written(words, several)
    named = {name: (known[name][0] if _is_switch(text, known[name]) else text or known[name][0],
                    known[name][1]) for name, text in found.items() if name in known}
    path = found.get(CONFIG_FLAG.flag.lstrip("-"))
    return named | (differing(flatten(read_yaml(path))) if path else {})


def _is_switch(text: str, known: tuple[str, str]) -> bool:
    return known == (ON, OFF) and text.lower() not in ("true", "false")


def differing(settings: Mapping[str, object]) -> dict[str, tuple[str, str]]:
    """(value, default) of our settings that differ from the defaults, by dotted path."""
    defaults = {**flatten(to_dict(from_dict({}))), **flatten(to_dict(run_from_dict({})))}
    return {path: (str(value), shown(defaults[path])) for path, value in settings.items()
            if path in defaults and comparable(value) != comparable(defaults[path])}


def shown(value: object) -> str:
    """A default for readers: a dash for none."""
    return "–" if value is None else str(value)
