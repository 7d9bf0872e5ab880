"""What a user can name: `abilities.txt` lists it, so that a change shows in a diff.

    python -m tests.packaging.test_abilities > tests/packaging/abilities.txt
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from moe_plugin.cli import main as command_line
from moe_plugin.cli.doctor.packages import import_everything
from moe_plugin.config.flags import flag_specs
from moe_plugin.training.run_features import FEATURES
from moe_plugin.utils.registry import KINDS

LIST = Path(__file__).with_name("abilities.txt")


def names() -> Iterator[str]:
    """Registered names of every kind, whether or not they can run here."""
    import_everything()
    importlib.import_module("moe_plugin.hosts.megatron.pipeline")
    importlib.import_module("scripts.bench.peers")
    for kind, registry in KINDS.items():
        # other tests register names of their own in the same process
        yield from (f"{kind}: {entry.name}" for entry in registry
                    if entry.value.__module__.startswith(("moe_plugin.", "scripts.")))


def settings() -> Iterator[str]:
    for spec in flag_specs():
        yield f"setting: {spec.path or '(file)'} {spec.flag}"


def flags_of_hosts() -> Iterator[str]:
    """Flags that are no settings of ours."""
    from moe_plugin.hosts.fairseq import options
    from moe_plugin.hosts.megatron.launch import extra_args_provider

    generated = {f.name for f in dataclasses.fields(options.GeneratedFlags)}
    for name, cls in vars(options).items():
        if dataclasses.is_dataclass(cls) and cls.__module__ == options.__name__:
            own = set(vars(cls).get("__annotations__", ())) - generated
            yield from (f"fairseq: {name} {field}" for field in own if not field.startswith("_"))
    megatron = extra_args_provider(argparse.ArgumentParser(add_help=False))
    yield from (f"megatron: {action.option_strings[0]}" for action in megatron._actions)


def options_of(commands: Mapping[str, command_line.Command], above: tuple[str, ...] = ()
               ) -> Iterator[str]:
    for name, command in commands.items():
        words = (*above, name)
        yield f"command: {' '.join(words)}"
        if command.parts is not None:
            yield from options_of(command.parts(), words)
            continue
        parser = argparse.ArgumentParser()
        command_line.add_commands(parser, command_line.COMMANDS, list(words))
        for word in words:
            parser = next(action for action in parser._actions if isinstance(
                action, argparse._SubParsersAction)).choices[word]
        for action in parser._actions:
            if not isinstance(action, argparse._HelpAction):
                told = ", ".join(action.option_strings) or action.dest
                yield f"command: {' '.join(words)} {told}"


def abilities() -> str:
    rows = {*names(), *settings(), *flags_of_hosts(), *options_of(command_line.COMMANDS),
            *(f"run feature: {of.__name__}" for row in FEATURES for of in row.kinds)}
    return "".join(f"{row}\n" for row in sorted(rows))


def test_the_list_is_up_to_date() -> None:
    """Where this fails on purpose, write the list again, and look at its diff."""
    now, listed = (set(text.splitlines()) for text in (
        abilities(), LIST.read_text(encoding="utf-8")))
    assert (sorted(listed - now), sorted(now - listed)) == ([], []), "gone, new; see the docstring"
    assert len(now) > 500


if __name__ == "__main__":
    sys.stdout.write(abilities())
