"""`moe-plugin <command>`: finds the command's module, imports only that one, runs it.

A command is a module of this package with `add_parser(subparsers)`, which adds one sub-command, and
`run(args) -> int`. Its name is the module's with dashes.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
from collections.abc import Iterable, Sequence

from moe_plugin import __version__

MODULES = ("doctor", "corpus", "report", "watch", "bench", "calibrate", "simulate", "plan",
           "profile_device", "emulate")


def main(argv: Sequence[str] | None = None) -> int:
    """Console script. Returns the exit status: 0 good, 1 the command found something wrong, 2 bad
    arguments.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    wanted = next((word.replace("-", "_") for word in argv if not word.startswith("-")), None)
    parser, runs = _parser((wanted,) if wanted in MODULES else MODULES)
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.DEBUG if args.verbose else logging.INFO, format="%(message)s")
    if args.command is None:
        parser.print_help()
        return 2
    try:
        return runs[args.command](args)
    except ValueError as error:
        if args.verbose:
            raise
        print(f"moe-plugin {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser(modules: Iterable[str]) -> tuple[argparse.ArgumentParser, dict]:
    parser = argparse.ArgumentParser(
        prog="moe-plugin",
        description="Mixture-of-Experts layers for fairseq, Megatron-core and plain PyTorch.")
    parser.add_argument("--version", action="version", version=f"moe-plugin {__version__}")
    parser.add_argument("--verbose", action="store_true",
                        help="log more; show the trace of an error")
    commands = parser.add_subparsers(dest="command", metavar="command",
                                     title="commands (each has its own --help)")
    runs = {}
    for name in modules:
        module = importlib.import_module(f"moe_plugin.cli.{name}")
        before = set(commands.choices)
        module.add_parser(commands)
        runs.update(dict.fromkeys(set(commands.choices) - before, module.run))
    return parser, runs


if __name__ == "__main__":
    raise SystemExit(main())
