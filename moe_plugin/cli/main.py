"""`moe-plugin <command>`: looks the command up in `COMMANDS`, imports only its module, runs it.

A command is the function of its name in its module, `name(args)`, which returns the exit status;
`name_options(parser)` adds its options and its description. Commands of the laboratory are in
`scripts`, which only a checkout has.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from moe_plugin import __version__
from moe_plugin.utils.checkout import laboratory
from moe_plugin.utils.messages import Parser, printable, short
from moe_plugin.utils.quiet import FAIRSEQ, MEGATRON, hidden, own_log

_LINE = 2000  # characters of an error


@dataclass(frozen=True)
class Command:
    """A command: its line in `--help`, and what carries it out.

    Attributes:
        module: in this package.
        laboratory: the module in `scripts` instead.
        study: what `bench` measures, which has `add_arguments(parser)` and `run(args)`.
        parts: gives the commands under it.
    """

    help: str
    module: str = ""
    laboratory: str = ""
    study: Any = None
    parts: Callable[[], Mapping[str, Command]] | None = None


def _studies() -> dict[str, Command]:
    return {study.name: Command(study.about, study=study)
            for study in laboratory("bench.studies").STUDIES.values()}


_SIMULATIONS = {
    "all-to-all": Command("time of each all-to-all algorithm by ranks and size", "clusters"),
    "routing": Command("time of each policy for overloaded experts, by a run's routing traces",
                       "clusters"),
}

COMMANDS = {
    "doctor": Command("check this installation: whether the layer works, what is wrong or missing",
                      "doctor"),
    "audit": Command("check a training step with experts over ranks, a framework's or yours: every "
                     "gradient against a dense computation", laboratory="audit.command"),
    "corpus": Command("write a text corpus made of the Python standard library's sources (no "
                      "download)", "runs"),
    "report": Command("write a run's report: one HTML page with plots", "runs"),
    "watch": Command("show a running job in the terminal", "runs"),
    "bench": Command("measure: each study with its name, `--quick` to try it out",
                     parts=_studies),
    "calibrate": Command("fit the link model of a cluster into a YAML file", "clusters"),
    "configs": Command("list the files of settings, models, clusters, devices that are installed, "
                       "or print one", "runs"),
    "simulate": Command("predict times on clusters that you do not have",
                        parts=lambda: _SIMULATIONS),
    "plan": Command("choose parallel sizes, layout, overlap and all-to-all for a model on a "
                    "cluster, and explain why", "plan"),
    "recommend": Command("measure the ranks it runs on, plan a model for them, print the host's "
                         "launch line with the predicted step time", "recommend"),
    "schedule": Command("compute the fastest schedule of a collective on a network, the cut that "
                        "proves it, and pictures", "schedule"),
    "profile-device": Command("measure matmuls and copies of this processor into a YAML file for "
                              "`plan`", "clusters"),
    "inspect": Command("show what a checkpoint holds: layers, experts, layout, data types, sizes",
                       "checkpoints"),
    "reshard": Command("convert a checkpoint to another format or other numbers of ranks",
                       "checkpoints"),
    "upcycle": Command("turn a dense checkpoint into a Mixture of Experts that computes the same "
                       "at first", "checkpoints"),
    "check-hf": Command("run a Hugging Face MoE model with our layer in place of its blocks, and "
                        "compare its logits", "checkpoints"),
    "emulate": Command("run any training command on an emulated cluster",
                       laboratory="emulate.command"),
    "fault": Command("run a training command in which something goes wrong at a stated moment",
                     laboratory="emulate.command"),
}


# as `--help` shows them
GROUPS = {
    "runs": ("report", "watch", "doctor", "corpus"),
    "planning": ("configs", "recommend", "plan", "schedule", "simulate", "calibrate",
                 "profile-device"),
    "checkpoints": ("inspect", "reshard", "upcycle", "check-hf"),
    "laboratory (needs the repository)": ("bench", "emulate", "fault", "audit"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Console script.

    Errors end with one line; `--verbose` shows where they come from.

    Returns:
        The exit status: 0 success, 1 the command found something wrong or failed, 2 bad arguments.
    """
    own = argv is None  # a process of its own
    argv = list(sys.argv[1:] if argv is None else argv)
    name = " ".join(["moe-plugin", *_words(argv)[:1]])
    try:
        with hidden([*FAIRSEQ, *MEGATRON]):
            with _not_collected() if own else nullcontext():
                args = parse(argv)
            own_log(args.verbose)
            return args.run(args)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # of `moe-plugin ... | head`; Python would write to it again at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if "--verbose" in argv:
            raise
        print(f"{name}: {_one_line(error)}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1


@contextmanager
def _not_collected() -> Iterator[None]:
    """Garbage is not looked for among what is imported meanwhile, neither now nor when the process
    ends: torch's million objects take it a second.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _words(argv: Sequence[str]) -> list[str]:
    return [word for word in argv if not word.startswith("-")]


def _one_line(error: Exception) -> str:
    """Our errors say what to do. Others have their type, and the way to see where they come from.
    """
    if isinstance(error, ValueError):
        return printable(" ".join(str(error).split()), _LINE)
    text = short(error) if isinstance(error, OSError) else f"{type(error).__name__}: {short(error)}"
    return f"{text}; `moe-plugin --verbose ...` shows where"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options of the command that `argv` names; `run(options)` carries it out.

    Raises:
        SystemExit: of argparse, with status 2 for bad arguments.
    """
    parser = Parser(
        prog="moe-plugin", formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Mixture-of-Experts layers for plain PyTorch, transformers, fairseq and "
                    "Megatron-core.",
        usage="%(prog)s [-h] [--version] [--verbose] command ...",
        epilog="\n".join(_grouped()))
    parser.add_argument("--version", action="version", version=f"moe-plugin {__version__}")
    parser.add_argument("--verbose", action="store_true",
                        help="log more; show the traceback of an error")
    line = os.environ.get("COMP_LINE") if "_ARGCOMPLETE" in os.environ else None
    add_commands(parser, COMMANDS, _words(argv if line is None else line.split()[1:]), shown=False)
    if line is not None:  # a shell asks what may follow: docs/index.md
        import argcomplete

        argcomplete.autocomplete(parser)
    return parser.parse_args(argv)


def _grouped() -> Iterator[str]:
    """The commands by group, for `--help`."""
    yield "Each command has its own --help."
    width = max(map(len, COMMANDS)) + 4
    for title, names in GROUPS.items():
        yield f"\n{title}:"
        for name in names:
            yield textwrap.fill(COMMANDS[name].help, 80, initial_indent=f"  {name}".ljust(width),
                                subsequent_indent=" " * width)


def _help(parser: argparse.ArgumentParser, status: int) -> int:
    parser.print_help()
    return status


def add_commands(parser: argparse.ArgumentParser, commands: Mapping[str, Command],
                  words: Sequence[str], above: str = "", level: str = "command",
                  shown: bool = True) -> None:
    """Add all commands by name, and the options of the one that `words` begins with.

    Options need the command's module, and some modules take seconds to import. shown: `--help`
    lists them in this order.
    """
    listed = all(command.study for command in commands.values())
    parser.set_defaults(run=lambda _: _help(parser, 0 if listed else 2))
    heading = {"title": f"{level}s (each has its own --help)"} if shown else {
        "help": argparse.SUPPRESS}
    group = parser.add_subparsers(dest=level, metavar=level, prog=parser.prog, **heading)
    for name, command in commands.items():
        listed_as = {"help": command.help} if shown else {}
        child = group.add_parser(name, description=f"{command.help}.", **listed_as)
        if words[:1] != [name]:
            continue
        if command.parts is not None:
            add_commands(child, command.parts(), words[1:], f"{name}-", level="part")
        elif command.study is not None:
            command.study.add_arguments(child)
            child.set_defaults(run=command.study.run)
        else:
            function = f"{above}{name}".replace("-", "_")
            found = vars(laboratory(command.laboratory) if command.laboratory else
                         importlib.import_module(f"moe_plugin.cli.{command.module}"))
            found[f"{function}_options"](child)
            child.set_defaults(run=found[function])


if __name__ == "__main__":
    raise SystemExit(main())
