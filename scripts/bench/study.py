"""Run studies, and write or redraw their pages in docs/benchmarks. All studies are run by a single
class.

The module of a study defines `TITLE` and two functions. The function `measure(args)` returns the
results of the study as plain values. The function `body(found)` returns the parts of the page below
the title, usually by calling `report.page` with a template in `pages`. A study on emulated clusters
uses `sweep.Sweep` for its measurements. A study with several parts defines `PARTS` instead, which
maps the name of each part to a pair of these two functions. If a run measures only some of the
parts, the results of the other parts are preserved. With `--out`, every part is written as soon as
it is measured. With `--resume`, parts that already exist are not measured again.

The module of a study may also define:

* `OPTIONS`: its options by name, `add_arguments(parser)` for other kinds of options, and
  `check(args)` to validate several options together;
* `MADE_BY`: the command that writes the page, if it differs from `moe-plugin bench NAME`;
* `PLOTS`: for each file name, a function of (numbers, path) that draws this plot;
* `pages(found)`: further pages by file name;
* `merge(old, new)`: adds the results of a run to those of earlier runs in the same folder;
* `failures(found)`: the goals that a run missed. If there are missed goals, the exit status is 1.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import moe_plugin
from moe_plugin.utils.messages import short, tracked
from moe_plugin.utils.regular_files import output_folder, write_regular
from scripts.bench.report import NOT_PROSE, document, load_in_words, page, versions_in_words

ROOT = Path(moe_plugin.__file__).resolve().parents[1]  # root of the checkout
DATA = "data"  # folder of the numbers, below the folder of the pages


@dataclass(frozen=True)
class Option:
    """An option of a study.

    Attributes:
        default: default value. The default also determines the type of the option. If the default
            is a tuple, the option accepts several values.
        help: one line that describes the option.
        quick: default value with `--quick`. None (default) means that `--quick` does not change the
            default.
        choices: allowed values. None (default) allows all values.
        least: smallest allowed value. Optional. By default, all values are allowed.
        required: whether the option must be given. If so, the default determines only the type.
    """

    default: Any
    help: str
    quick: Any = None
    choices: Sequence[Any] | None = None
    least: float | None = None
    required: bool = False

    def add(self, parser: argparse.ArgumentParser, name: str) -> None:
        """Add the option `--name` to a parser. The value of the option is None until `Study.fill`
        sets the default.
        """
        several = isinstance(self.default, tuple)
        kind = type(self.default[0] if several else self.default)
        if kind is bool:
            parser.add_argument(f"--{name}", action="store_true", default=None, help=self.help)
            return
        shown = " ".join(map(str, self.default)) if several else self.default
        default = "" if self.required else f" (default: {shown})"
        parser.add_argument(
            f"--{name}", type=kind, nargs="+" if several else None, choices=self.choices,
            required=self.required, help=f"{self.help}{default}".replace("%", "%%"))

    def check(self, name: str, value: Any) -> None:
        """Check the value of the option `--name`.

        Raises:
            ValueError: if the value is smaller than `least`.
        """
        if self.least is not None and value < self.least:
            raise ValueError(f"--{name} {short(value)} is out of bounds: must be >= {self.least}. "
                             f"Leave out --{name} for the default")


def run_options(name: str) -> dict[str, Option]:
    """Return the options of a study that continues earlier training runs, for `folder_of_runs`."""
    return {"runs": Option(f"runs/{name}", "folder of the runs, which the same command continues"),
            "fresh": Option(False, "remove the folder of the runs first")}


def folder_of_runs(args: argparse.Namespace) -> Path:
    """Return the folder for a study's runs. With `--fresh`, the first call removes earlier runs."""
    place = Path(args.runs).resolve()
    if args.fresh:
        shutil.rmtree(place, ignore_errors=True)
        args.fresh = False  # the other parts of this run use the same folder
    place.mkdir(parents=True, exist_ok=True)
    return place


@dataclass(frozen=True)
class Study:
    """A measurement that `moe-plugin bench` can run.

    Attributes:
        about: one line that describes what the study measures. If this line contains "(computed)",
            the study does not measure anything on this machine.
        needs: requirements of the study, as keys of `NEEDS`.
        module: name of the module in `scripts.bench.studies`. If the module defines several
            studies, the class name follows the module name. Defaults to the name of the study.
        stem: file name of the page without the extension. Defaults to the name of the study.
    """

    name: str
    about: str
    needs: tuple[str, ...] = ()
    module: str = ""
    stem: str = ""

    @property
    def code(self) -> Any:
        """Import and return the module or class of the study."""
        name, _, group = (self.module or self.name.replace("-", "_")).partition(".")
        module = importlib.import_module(f"scripts.bench.studies.{name}")
        return getattr(module, group) if group else module

    @property
    def options(self) -> Mapping[str, Option]:
        own, parts = getattr(self.code, "OPTIONS", {}), tuple(self.parts)
        several = {
            "parts": Option(parts, "parts of the page to measure; the other parts are kept",
                            choices=parts),
            "resume": Option(False, "skip the parts whose results are already in --out")}
        return {**several, **own} if parts else own

    @property
    def parts(self) -> Mapping[str, tuple[Any, Any]]:
        """A mapping from the name of each part to its functions (measure, body), or an empty
        mapping.
        """
        return getattr(self.code, "PARTS", {})

    @property
    def page_name(self) -> str:
        return f"{self.stem or self.name.replace('-', '_')}.md"

    @property
    def numbers_name(self) -> str:
        """Path of the file that contains the study's results, relative to the folder of the pages.
        """
        return f"{DATA}/{Path(self.page_name).stem}.json"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        code = self.code
        needs = f" Needs {', '.join(map(NEEDS_SAID.__getitem__, self.needs))}." * bool(self.needs)
        parser.description = " ".join((code.__doc__ or "").split()).replace("%", "%%") + needs
        parser.add_argument("--out", type=Path, metavar="FOLDER",
                            help=f"write {self.page_name}, {self.numbers_name} and the plots to "
                                 "this folder")
        parser.add_argument("--json", action="store_true",
                            help="print the results instead of the page")
        parser.add_argument("--quick", action="store_true",
                            help="use small sizes to try out the command")
        parser.add_argument("--redraw", action="store_true",
                            help="do not measure anything; redraw the page and the plots from the "
                                 "results in --out")
        for name, option in self.options.items():
            option.add(parser, name)
        if hasattr(code, "add_arguments"):
            code.add_arguments(parser)

    def fill(self, args: argparse.Namespace) -> argparse.Namespace:
        """Set all options that were not given to their defaults, and check the values of all
        options.
        """
        for name, option in self.options.items():
            if getattr(args, name.replace("-", "_")) is None:
                quick = args.quick and option.quick is not None
                setattr(args, name.replace("-", "_"), option.quick if quick else option.default)
            option.check(name, getattr(args, name.replace("-", "_")))
        return args

    def measure(self, args: argparse.Namespace) -> Any:
        """Run the study and return its results as plain values. See `with_machine`.

        Raises:
            ValueError: if a requirement of the study is missing.
        """
        check_needs(f"bench {self.name}", self.needs)
        found = ({name: with_machine(self.parts[name][0], args) for name in args.parts}
                 if self.parts else with_machine(self.code.measure, args))
        return json.loads(json.dumps(found))  # the page must be the same when drawn from the file

    def _measured(self, args: argparse.Namespace, folder: Path | None) -> Any:
        """Measure one part after the other, and write the results. The results of parts measured in
        earlier runs are preserved.
        """
        path = None if folder is None else folder / self.numbers_name
        merge = getattr(self.code, "merge", dict.__or__ if self.parts else None)
        found = self._earlier(folder) if merge and path is not None and path.exists() else None
        left = [part for part in args.parts if not (args.resume and found and part in found)
                ] if self.parts else [None]
        for part in tracked(left, f"bench {self.name}", "part"):
            one = args if part is None else argparse.Namespace(**{**vars(args), "parts": [part]})
            new = self.measure(one)
            if new is None:  # only rank 0 returns numbers
                return None
            found = new if found is None else merge(found, new)
            if path is not None:
                write_numbers(path, found)
                self.write(folder, found)
        return found

    def page(self, found: Any) -> str:
        """Generate the page for the given results, in Markdown."""
        code = self.code
        sections = [(found[name], write) for name, (_, write) in self.parts.items()
                    if name in found] or [
                        (found, getattr(code, "body", None) or partial(page, code.__name__))]
        computed = "(computed)" in self.about
        command = getattr(code, "MADE_BY", f"moe-plugin bench {self.name}")
        lines = [line for number, (one, write) in enumerate(sections) for line in _say_machine(
            write(one), {} if computed else one, "" if number else command)]
        return document(f"# {code.TITLE}", *lines)

    def write(self, folder: Path, found: Any) -> None:
        write_regular(folder / self.page_name, self.page(found))
        for name, text in getattr(self.code, "pages", lambda _: {})(found).items():
            write_regular(folder / name, text)
        for name, draw in getattr(self.code, "PLOTS", {}).items():
            draw(found, folder / name)

    def run(self, args: argparse.Namespace) -> int:
        """Run the command: measure, print and write the results. Return the exit status."""
        code, args = self.code, self.fill(args)
        if hasattr(code, "check"):
            code.check(args)
        folder = self._folder(args.out)
        if args.redraw:
            self.write(folder, self._earlier(folder))
            return 0
        found = self._measured(args, folder)
        if found is None:
            return 0
        if args.json:
            sys.stdout.write(json.dumps(found, indent=1) + "\n")
        else:
            sys.stdout.write(self.page(found))
            sys.stdout.writelines(getattr(code, "pages", lambda _: {})(found).values())
        failed = getattr(code, "failures", lambda _: [])(found)
        sys.stderr.write("".join(f"{one}\n" for one in failed))
        return int(bool(failed))

    def _folder(self, out: Path | None) -> Path | None:
        """Check that all files can be written to `--out` before a measurement, which may take
        hours.
        """
        if out is None:
            return None
        output_folder(out / DATA, [Path(self.numbers_name).name])
        return output_folder(out, [self.page_name, *getattr(self.code, "PLOTS", {})])

    def _earlier(self, folder: Path | None) -> Any:
        if folder is None:
            raise ValueError("--redraw needs --out FOLDER, the folder that contains the results. "
                             "Use, for example, --out docs/benchmarks")
        return read_numbers(folder / self.numbers_name)


def check_needs(who: str, needs: Sequence[str]) -> None:
    """Check that all requirements of a study are met.

    Raises:
        ValueError: if a requirement (a key of `NEEDS`) is not met.
    """
    for need in needs:
        if (reason := NEEDS[need]()) is not None:
            raise ValueError(f"{who} needs {NEEDS_SAID[need]}: {reason}")


def with_machine(measure: Callable[..., Any], *args: Any) -> Any:
    """Call `measure(*args)` and return its result, with information about the machine.

    If the result is a mapping, add the package versions, the device, the date, the number of cores,
    and the load averages before and after the measurement.
    """
    from scripts.bench.measure import versions  # imports torch

    before = os.getloadavg()[0]
    found = measure(*args)
    if isinstance(found, dict):
        if "versions" not in found:
            device = getattr(args[0], "device", None) if args else None
            found["versions"] = versions(device or "cpu")
        found.setdefault("load", [round(before, 1), round(os.getloadavg()[0], 1)])
        found.setdefault("cores", os.cpu_count())
    return found


def _say_machine(lines: Sequence[str], found: Any, command: str) -> Iterator[str]:
    """After the first paragraph, insert a paragraph about the command and the machine."""
    said = [f"This page is written by `{command}`."] * bool(command)
    found = found if isinstance(found, dict) else {}
    if "versions" in found:
        said.append(versions_in_words(found["versions"]))
    if "load" in found:
        said.append(load_in_words(found["load"], found.get("cores")))
    for line in lines:
        yield line
        if said and not line.startswith(NOT_PROSE):
            yield " ".join(said)
            said.clear()


def write_numbers(path: Path, value: Any) -> None:
    """Write results as JSON, with one line for each item of the outermost list or mapping."""
    if isinstance(value, dict):
        lines = [f"{json.dumps(key)}: {_compact(one)}" for key, one in value.items()]
    else:
        lines = [_compact(one) for one in value]
    ends = "{}" if isinstance(value, dict) else "[]"
    write_regular(path, "\n".join([ends[0], ",\n".join(lines), ends[1], ""]))


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def read_numbers(path: Path) -> Any:
    """Read the results of an earlier run.

    Raises:
        ValueError: if the file does not exist or is not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} contains no results of a study ({short(str(error))}). Measure "
                         "first, without --redraw, or choose another --out") from error


def _asked(question: str) -> Any:
    module, _, name = question.partition(":")
    return lambda: getattr(importlib.import_module(module), name)()


def _package(name: str) -> Any:
    return lambda: None if importlib.util.find_spec(name) else f"package {name} is not installed"


# For each requirement: a function that returns why it is missing, or None if it is fulfilled.
NEEDS = {
    "nodes": _asked("scripts.emulate:why_not"),
    "memory limit": _asked("scripts.bench.child:why_not"),
    **{name: _package(name)
       for name in ("fairseq", "megatron", "transformers", "torchft", "timm", "igraph", "triton",
                    "matplotlib", "mlxtend")},
}
NEEDS_SAID = {
    **{name: name for name in NEEDS}, "nodes": "an emulated cluster (Linux, root)",
    "memory limit": "a cgroup with a memory limit (root)", "megatron": "megatron-core",
    "mlxtend": "mlxtend (pip install --no-deps mlxtend==0.23.4)",
}
