"""Settings of Megatron and arguments of its training script, versions 0.15 to 0.19. Importing this
imports nothing of Megatron.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
import typing
import warnings
from collections.abc import Callable, Container, Iterable, Iterator
from multiprocessing import spawn
from pathlib import Path
from types import ModuleType
from typing import Any

from moe_plugin.observe.model_layers import OFF, ON, chosen, shown
from moe_plugin.utils.messages import short

Provider = Callable[[argparse.ArgumentParser], argparse.ArgumentParser]
_parsers: list[argparse.ArgumentParser] = []  # the script's, once it has parsed
_own: set[str] = set()  # the arguments among its own that are Megatron's
_words: list[str] = []  # that it has parsed: the command's, and in front of them a file's
# What a version of Megatron calls otherwise: the name that this host knows -> the newer one. A
# renamed setting of `TransformerConfig`, or argument of the script, is one line here.
RENAMED = {"cuda_graph_scope": "cuda_graph_modules"}  # from 0.18 on, which has both names

# remedy where there is no `HybridModel`
WITH_HYBRID = ("must be megatron-core 0.18 or newer; pip install --ignore-requires-python "
               "--no-deps megatron-core==0.19.2")
# versions whose passes take a communicator between stages; those that overlap exchanges
UNEQUAL_STAGES, OVERLAPPED = "0.15.3 to 0.19", ">= 0.16"


def setting(config: Any, name: str, default: Any = None) -> Any:
    """A setting of `TransformerConfig`; `default` in versions that do not have it."""
    return getattr(config, RENAMED.get(name, name), None) or getattr(config, name, default)


def with_known_names(config: Any) -> Any:
    """The same config, whose renamed settings have the names that this host knows, too."""
    for known, newer in RENAMED.items():
        if not hasattr(config, known) and hasattr(config, newer):
            setattr(config, known, getattr(config, newer))
    return config


def newer_name(name: str, known: Container[str]) -> str:
    """A setting's name in a version that has the names `known`."""
    return RENAMED[name] if name not in known and RENAMED.get(name) in known else name


def balance_kinds(config: Any) -> list[str]:
    """Values of `moe_router_load_balancing_type` that this Megatron's router knows."""
    kinds = ["aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"]
    newest = hasattr(config, "moe_router_quantile_balancing_ema")  # from 0.19 on
    return [*kinds, "quantile_balancing"] if newest else kinds


def plain_name(value: Any) -> str:
    """Name of a choice, which is text in older versions and an enum in newer ones."""
    return str(getattr(value, "name", value))


def cuda_graphs(config: Any) -> str | None:
    """What makes CUDA graphs (`cuda_graph_impl`): local, transformer_engine ...; None: nothing."""
    name = plain_name(setting(config, "cuda_graph_impl")).lower()
    return None if name == "none" else name


def script_arguments() -> dict[str, Any]:
    """Parsed arguments of Megatron's own training script; empty where none runs.

    So it is where only megatron-core is installed.
    """
    state = sys.modules.get("megatron.training.global_vars")
    arguments = getattr(state, "_GLOBAL_ARGS", None)
    return {} if arguments is None else vars(with_known_names(arguments))


def vocabulary_sizes() -> list[int]:
    """Token ids of the script's tokenizer, then with the rows by which Megatron fills up its
    embedding, whose number depends on tensor parallelism; [] where no script says them.
    """
    state = sys.modules.get("megatron.training.global_vars")
    sizes = (getattr(getattr(state, "_GLOBAL_TOKENIZER", None), "vocab_size", None),
             script_arguments().get("padded_vocab_size"))
    return [size for size in sizes if size]


def tokens_of_call() -> int | None:
    """Tokens of a micro-batch on a rank by the script's arguments; None: not known."""
    known = script_arguments()
    length, sequences = known.get("seq_length"), known.get("micro_batch_size")
    if not length or not sequences:
        return None
    return length * sequences // (known.get("context_parallel_size") or 1)


def parsed_defaults() -> dict[str, Any]:
    """By name: the defaults of the script's arguments whose values differ from them, as far as its
    parser says them.
    """
    values, found = script_arguments(), dict[str, Any]()
    for parser in _parsers:  # whose `get_default` goes through a thousand arguments for each name
        first = {action.dest: action.default for action in reversed(parser._actions)
                 if action.default is not None}
        defaults = {**parser._defaults, **first}
        found |= {name: defaults.get(name) for name, value in values.items()
                  if defaults.get(name) != value}
    return found


def given_settings() -> dict[str, tuple[str, str]]:
    """What the user gave the script otherwise than its defaults: (as written, default) by flag, and
    by path in the file of `--moe-config`.
    """
    changed = parsed_defaults()
    known, several = dict[str, tuple[str, str]](), set[str]()
    for action in (action for parser in _parsers for action in parser._actions):
        names = [option.lstrip("-").replace("_", "-") for option in action.option_strings]
        if action.nargs not in (None, 0, "?"):
            several.update(names)
        if action.dest in changed:
            both = (ON, OFF) if action.nargs == 0 else ("", shown(changed[action.dest]))
            known.update(dict.fromkeys(names, both))
    return chosen(_words, known, several)


def megatrons_own(names: Iterable[str]) -> list[str]:
    """Those of the script's arguments that Megatron's training code itself defines, as far as a
    parser of it was seen.
    """
    return [name for name in names if name in _own]


def script_config() -> Any:
    """`TransformerConfig` of the arguments of Megatron's own training script."""
    arguments = importlib.import_module("megatron.training.arguments")
    return with_known_names(
        arguments.core_transformer_config_from_args(argparse.Namespace(**script_arguments())))


def training_module(name: str) -> ModuleType:
    """`megatron.training.NAME`.

    Raises:
        ValueError: it is not there, or needs a package that is not; it says what to install.
    """
    _older_python()
    try:
        return importlib.import_module(f"megatron.training.{name}")
    except ModuleNotFoundError as error:
        raise ValueError(_MISSING.format(error.name)) from error


_MISSING = (
    "Megatron's training code (megatron.training) cannot be imported: there is no module {!r}. "
    "With Python 3.11 or newer: pip install --ignore-requires-python --no-deps "
    "megatron-core==0.19.2 pyyaml; or start a script of a Megatron-LM checkout, which has it next "
    "to the script. Layers by swap_moe work without it")


def _older_python() -> None:
    """Give Python before 3.12 what the training code of 0.18 and 0.19 needs: `typing.override`."""
    if sys.version_info >= (3, 12) or "override" in vars(typing):
        return
    typing.override = lambda method: method  # type: ignore[attr-defined]
    prepare = spawn.get_preparation_data

    def without_script(name: str) -> dict[str, Any]:
        # a spawned process would import the script, and with it Megatron, before anything of ours;
        # those of Megatron, which write checkpoints, need nothing of it
        return {key: value for key, value in prepare(name).items() if key != "init_main_from_path"}

    spawn.get_preparation_data = without_script


def replace_training(name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put `wrap(function)` in place of a function of Megatron's training code, in every module of
    it that has imported it; nothing in versions without it.
    """
    training_module("training")  # imports all the others
    modules = [module for key, module in sys.modules.items() if key.startswith("megatron.training")]
    found = [vars(module)[name] for module in modules if name in vars(module)]
    for original in found[:1]:
        ours = wrap(original)
        for module in modules:
            if vars(module).get(name) is original:
                setattr(module, name, ours)


def mend_config_warning() -> None:
    """Let Megatron warn of tensor and expert parallelism without sequence parallelism.

    0.15: `model_parallel_config` calls `warnings.warn` there and does not import `warnings`, so
    that no such config can be built.
    """
    module = importlib.import_module("megatron.core.model_parallel_config")
    vars(module).setdefault("warnings", warnings)


def keep_compiled_helpers() -> None:
    """Do not compile the helpers of Megatron's datasets again where they can be imported.

    0.17 to 0.19: the training code runs `make`, but the wheels, which have the compiled module,
    have no Makefile. A checkout's Makefile asks the `python3` of the path, which may be another
    Python than this one, for the headers and for the suffix of the module.
    """
    datasets = importlib.import_module("megatron.core.datasets.utils")
    compiled: Callable[[], None] = functools.partial(
        compile_helpers, Path(str(datasets.__file__)).parent)
    with contextlib.suppress(ImportError):
        importlib.import_module("megatron.core.datasets.helpers_cpp")
        compiled = lambda: None  # noqa: E731
    datasets.compile_helpers = compiled  # type: ignore[attr-defined]


def compile_helpers(folder: Path) -> None:
    """Compile the helpers of a checkout's datasets for this Python.

    Raises:
        ValueError: something is missing; the message says what to install.
    """
    what = f"Megatron's dataset helpers in {short(str(folder))}, which are compiled in a first run,"
    if importlib.util.find_spec("pybind11") is None:
        raise ValueError(f"{what} need the package pybind11; install it with "
                         f"{short(sys.executable)} -m pip install pybind11")
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
    command = ["make", "-C", str(folder), f"LIBEXT={sysconfig.get_config_var('EXT_SUFFIX')}"]
    try:
        done = subprocess.run(command, env={**os.environ, "PATH": path}, capture_output=True,
                              text=True, check=False)
    except FileNotFoundError as error:
        raise ValueError(f"{what} need make and a C++ compiler; install both, such as with "
                         "apt-get install make g++") from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise ValueError(f"{what} cannot be compiled for this Python: {short(said, 300)}; install "
                         f"make and a C++ compiler, and try {short(' '.join(command), 300)}")
    importlib.invalidate_caches()


def extend_parse_args(ours: Callable[[Provider | None], Provider],
                      after: Callable[[argparse.Namespace], object] = lambda args: None) -> None:
    """Let Megatron's `parse_args` use `ours(provider)` in place of a script's provider, and call
    `after` with what it has parsed.

    0.15 to 0.19: `pretrain`, or from 0.18 on the script, hands the provider on to `parse_args`.
    """

    def extend(parse: Callable[..., Any]) -> Callable[..., Any]:

        def parse_args(extra_args_provider: Provider | None = None, *args: Any,
                       **kwargs: Any) -> argparse.Namespace:
            parsed: argparse.Namespace = parse(kept(ours(extra_args_provider)), *args, **kwargs)
            after(parsed)
            return parsed

        def kept(provider: Provider) -> Provider:

            def provide(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
                _own.update(action.dest for action in parser._actions if not _parsers)
                parser.parse_known_args = remembered(parser)  # type: ignore[method-assign]
                _parsers[:] = [provider(parser)]
                return _parsers[0]

            return provide

        return parse_args

    def remembered(parser: argparse.ArgumentParser) -> Callable[..., Any]:

        def parse_known_args(args: Any = None, namespace: Any = None) -> Any:
            _words[:] = sys.argv[1:] if args is None else args
            # a provider may have changed the parser's class, whose method then suggests names
            return type(parser).parse_known_args(parser, args, namespace)

        return parse_known_args

    replace_training("parse_args", extend)


_ADDED = re.compile(r"( when instantiating \w+)+\Z")


class SettingsError(ValueError):
    """A `ValueError` that ends with its remedy.

    0.15 to 0.19: where a module of a spec cannot be built, Megatron makes its error again, of the
    same class, with " when instantiating CLASS" behind the words, once at each level of the spec.
    """

    def __init__(self, words: str) -> None:
        super().__init__(_ADDED.sub("", words))


@contextlib.contextmanager
def settings_errors() -> Iterator[None]:
    """`ValueError` inside becomes `SettingsError`, with the same words and traceback."""
    try:
        yield
    except ValueError as error:
        if type(error) is not ValueError:
            raise
        raise SettingsError(str(error)).with_traceback(error.__traceback__) from error.__cause__
