"""The console script `moe-plugin <command>`. The script imports only the module of the requested
command, which it looks up in `COMMANDS`.

A command is a function `name(args)` that returns the exit status. The function
`name_options(parser)` in the same module adds the options and the description of the command. The
commands for benchmarks, emulation and audits are in `scripts`, which exists only in a checkout of
the repository.
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

_LINE = 2000  # largest number of characters of an error message


@dataclass(frozen=True)
class Command:
    """A command of `moe-plugin`.

    Attributes:
        help: the one-line description of the command in `--help`.
        module: module of the command in this package.
        laboratory: module of the command in the `scripts` folder. If set, `module` is not used.
        study: module of a benchmark study. Set only for the subcommands of `bench`. The module
            defines the functions `add_arguments(parser)` and `run(args)`.
        parts: function that returns the subcommands, or None if there are no subcommands.
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
    "all-to-all": Command("predict the time of each all-to-all algorithm by ranks and size",
                          "clusters"),
    "routing": Command("predict the time of each policy for overloaded experts from the routing "
                       "traces of a run", "clusters"),
}

COMMANDS = {
    "doctor": Command("check this installation: whether the layer works, and what is missing",
                      "doctor"),
    "audit": Command("check the gradients of a training step with experts on several ranks against "
                     "a dense computation; the step may be a framework's or your own",
                     laboratory="audit.command"),
    "corpus": Command("write a text corpus from the Python standard library's sources (no "
                      "download)", "runs"),
    "report": Command("write a run's report: one HTML page with plots", "runs"),
    "watch": Command("show a running job in the terminal", "runs"),
    "bench": Command("run measurements; each study has a name, and `--quick` gives a short run",
                     parts=_studies),
    "calibrate": Command("fit the link model of a cluster into a YAML file", "clusters"),
    "configs": Command("list the installed files of settings, models, clusters and devices, or "
                       "print one of them", "runs"),
    "simulate": Command("predict times on clusters that you do not have",
                        parts=lambda: _SIMULATIONS),
    "plan": Command("choose parallel sizes, layout, overlap and all-to-all for a model on a "
                    "cluster, and explain why", "plan"),
    "recommend": Command("measure these ranks, plan a model for them, and print the launch line "
                         "with the predicted step time", "recommend"),
    "schedule": Command("compute the fastest schedule of a collective on a network, prove that it "
                        "is optimal, and draw it", "schedule"),
    "profile-device": Command("measure matmuls and copies of this processor, and write them to a "
                              "YAML file for `plan`", "clusters"),
    "inspect": Command("show the contents of a checkpoint: layers, experts, layout, dtypes, sizes",
                       "checkpoints"),
    "reshard": Command("convert a checkpoint to another format or to other numbers of ranks",
                       "checkpoints"),
    "upcycle": Command("convert a dense checkpoint to a Mixture of Experts that initially computes "
                       "the same", "checkpoints"),
    "check-hf": Command("replace the MoE blocks of a Hugging Face model by our layers, and compare "
                        "the logits", "checkpoints"),
    "emulate": Command("run any training command on an emulated cluster",
                       laboratory="emulate.command"),
    "fault": Command("run a training command with a fault injected at a given time",
                     laboratory="emulate.command"),
}


# groups of the commands in `--help`
GROUPS = {
    "runs": ("report", "watch", "doctor", "corpus"),
    "planning": ("configs", "recommend", "plan", "schedule", "simulate", "calibrate",
                 "profile-device"),
    "checkpoints": ("inspect", "reshard", "upcycle", "check-hf"),
    "laboratory (needs the repository)": ("bench", "emulate", "fault", "audit"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the console script.

    Errors are printed as a single line on stderr. With `--verbose`, the traceback is also printed.

    Returns: the exit status: 0 for success, 1 if the command failed or found a problem, and 2 for
        invalid arguments.
    """
    own = argv is None  # whether this process runs only this command
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
    except BrokenPipeError:  # as with `| head`; Python would write to the pipe again when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if "--verbose" in argv:
            raise
        print(f"{name}: {_one_line(error)}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1


@contextmanager
def _not_collected() -> Iterator[None]:
    """Disable garbage collection while modules are imported. The imported objects are also excluded
    from later collections.

    Without this, collecting the million objects that torch creates takes one second during the
    imports and another second at exit.
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
    """Format an exception as one line.

    Error messages of this package already say how to fix the problem. All other exceptions are
    shown with their type and a hint to use `--verbose`.
    """
    if isinstance(error, ValueError):
        return printable(" ".join(str(error).split()), _LINE)
    text = short(error) if isinstance(error, OSError) else f"{type(error).__name__}: {short(error)}"
    return f"{text}; `moe-plugin --verbose ...` shows the traceback"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the options of the command in `argv`. To run the command, call `options.run(options)`
    with the returned options.

    Raises:
        SystemExit: If argparse finds invalid arguments (status 2).
    """
    parser = Parser(
        prog="moe-plugin", formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Mixture-of-Experts layers for plain PyTorch, transformers, fairseq and "
                    "Megatron-core.",
        usage="%(prog)s [-h] [--version] [--verbose] command ...",
        epilog="\n".join(_grouped()))
    parser.add_argument("--version", action="version", version=f"moe-plugin {__version__}")
    parser.add_argument("--verbose", action="store_true",
                        help="log more, and show the traceback of an error")
    line = os.environ.get("COMP_LINE") if "_ARGCOMPLETE" in os.environ else None
    add_commands(parser, COMMANDS, _words(argv if line is None else line.split()[1:]), shown=False)
    if line is not None:  # a shell asks for completions, see docs/index.md
        import argcomplete

        argcomplete.autocomplete(parser)
    return parser.parse_args(argv)


def _grouped() -> Iterator[str]:
    """Yield the lines of `--help` that list the commands by group."""
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
    """Add all commands to a parser, and add the options of the command selected by the first item
    of `words`.

    Only the options of this command are added, because importing the modules of all commands would
    take seconds.

    Args:
        commands: mapping from names to commands.
        words: the command line without flags, split into words.
        above: prefix of the functions that implement the subcommands.
        level: what `--help` calls these commands, `command` or `part`.
        shown: whether `--help` lists and describes the commands.
    """
    listed = all(command.study for command in commands.values())
    parser.set_defaults(run=lambda _: _help(parser, 0 if listed else 2))
    heading: dict[str, Any] = {"title": f"{level}s (each has its own --help)"} if shown else {
        "help": argparse.SUPPRESS}
    group = parser.add_subparsers(dest=level, metavar=level, prog=parser.prog, **heading)
    for name, command in commands.items():
        listed_as: dict[str, Any] = {"help": command.help} if shown else {}
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
            module = vars(laboratory(command.laboratory) if command.laboratory else
                          importlib.import_module(f"moe_plugin.cli.{command.module}"))
            module[f"{function}_options"](child)
            child.set_defaults(run=module[function])


if __name__ == "__main__":
    raise SystemExit(main())
