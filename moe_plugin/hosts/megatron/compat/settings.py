"""Access to Megatron's settings and its training script's arguments, for versions 0.15 to 0.19.

Importing this module does not import Megatron.
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

from moe_plugin.checkpoint.formats.megatron.common import RENAMED
from moe_plugin.observe.model_layers import OFF, ON, chosen, shown
from moe_plugin.utils.messages import short

Provider = Callable[[argparse.ArgumentParser], argparse.ArgumentParser]
_parsers: list[argparse.ArgumentParser] = []  # the script's parser, once it has parsed
_own: set[str] = set()  # names of the arguments that Megatron itself defines
_words: list[str] = []  # the parsed words: those of a settings file, then the command line

# remedy for a Megatron without `HybridModel`
WITH_HYBRID = ("megatron-core 0.18 or newer: pip install --ignore-requires-python "
               "--no-deps megatron-core==0.19.2")
# versions that accept a communicator between stages; versions that can overlap exchanges
UNEQUAL_STAGES, OVERLAPPED = "0.15.3 to 0.19", ">= 0.16"


def setting(config: Any, name: str, default: Any = None) -> Any:
    """Return a setting of `TransformerConfig`, or `default` if the setting does not exist."""
    return getattr(config, RENAMED.get(name, name), None) or getattr(config, name, default)


def with_known_names(config: Any) -> Any:
    """Add attributes for settings that Megatron has renamed to a config, and return the config. The
    additional attributes have the older names, which this package uses.
    """
    for known, newer in RENAMED.items():
        if not hasattr(config, known) and hasattr(config, newer):
            setattr(config, known, getattr(config, newer))
    return config


def newer_name(name: str, known: Container[str]) -> str:
    """Return the name of a setting in the installed Megatron, which defines the names `known`."""
    return RENAMED[name] if name not in known and RENAMED.get(name) in known else name


def balance_kinds(config: Any) -> list[str]:
    """Return the load-balancing types that the router of the installed Megatron supports."""
    kinds = ["aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"]
    newest = hasattr(config, "moe_router_quantile_balancing_ema")  # from 0.19 on
    return [*kinds, "quantile_balancing"] if newest else kinds


def plain_name(value: Any) -> str:
    """Return a value's name. The value is a string, or an enum member in newer versions."""
    return str(getattr(value, "name", value))


def cuda_graphs(config: Any) -> str | None:
    """Return the setting `cuda_graph_impl`, or None if CUDA graphs are disabled."""
    name = plain_name(setting(config, "cuda_graph_impl")).lower()
    return None if name == "none" else name


def script_arguments() -> dict[str, Any]:
    """Return a dict of the parsed arguments of Megatron's own training script, or an empty dict if
    the script is not running.

    The dict is also empty if only megatron-core is installed.
    """
    state = sys.modules.get("megatron.training.global_vars")
    arguments = getattr(state, "_GLOBAL_ARGS", None)
    return {} if arguments is None else vars(with_known_names(arguments))


def vocabulary_sizes() -> list[int]:
    """Return a list of two sizes: the number of token ids of the script's tokenizer, and the number
    of embedding rows after padding.

    The padding depends on the tensor-parallel size. Unknown sizes are left out, so the list can
    also contain one size or be empty.
    """
    state = sys.modules.get("megatron.training.global_vars")
    sizes = (getattr(getattr(state, "_GLOBAL_TOKENIZER", None), "vocab_size", None),
             script_arguments().get("padded_vocab_size"))
    return [size for size in sizes if size]


def tokens_of_call() -> int | None:
    """Return the number of tokens per micro-batch and rank, or None if it is unknown."""
    known = script_arguments()
    length, sequences = known.get("seq_length"), known.get("micro_batch_size")
    if not length or not sequences:
        return None
    return length * sequences // (known.get("context_parallel_size") or 1)


def parsed_defaults() -> dict[str, Any]:
    """Return a dict from each argument that differs from its default value to the default value.

    Only arguments that the script's parser defines have known defaults.
    """
    values, changed = script_arguments(), dict[str, Any]()
    # `get_default` is avoided, because it searches a thousand arguments for each name
    for parser in _parsers:
        first = {action.dest: action.default for action in reversed(parser._actions)
                 if action.default is not None}
        defaults = {**parser._defaults, **first}
        changed |= {name: defaults.get(name) for name, value in values.items()
                    if defaults.get(name) != value}
    return changed


def given_settings() -> dict[str, tuple[str, str]]:
    """Return the settings for which the user chose a value other than the script's default.

    Each value is a pair of strings: the setting as the user wrote it, and the default. The keys are
    flags, or dotted paths for settings from the `--moe-config` file.
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
    """Return the argument names in `names` that Megatron's own training code defines.

    The list is empty if no parser created by Megatron was recorded.
    """
    return [name for name in names if name in _own]


def script_config() -> Any:
    """Build the `TransformerConfig` from the arguments of Megatron's own training script."""
    arguments = importlib.import_module("megatron.training.arguments")
    return with_known_names(
        arguments.core_transformer_config_from_args(argparse.Namespace(**script_arguments())))


def training_module(name: str) -> ModuleType:
    """Import the module `megatron.training.NAME` and return it.

    Raises:
        ValueError: If the module or a package that the module needs is missing. The message
            contains the installation command.
    """
    _older_python()
    try:
        return importlib.import_module(f"megatron.training.{name}")
    except ModuleNotFoundError as error:
        raise ValueError(_MISSING.format(error.name)) from error


_MISSING = (
    "Megatron's training code (megatron.training) cannot be imported, because module {!r} is "
    "missing. With Python 3.11 or newer: pip install --ignore-requires-python --no-deps "
    "megatron-core==0.19.2 pyyaml; or start a script of a Megatron-LM checkout, which contains the "
    "training code. Layers created by swap_moe do not need it.")


def _older_python() -> None:
    """Add `typing.override`, which Megatron 0.18 and 0.19 import, to Python versions before 3.12.
    """
    if sys.version_info >= (3, 12) or "override" in vars(typing):
        return
    typing.override = lambda method: method  # type: ignore[attr-defined]
    prepare = spawn.get_preparation_data

    def without_script(name: str) -> dict[str, Any]:
        # A spawned process would import the script, and with it Megatron, before `typing.override`
        # is added there. Megatron spawns processes only to write checkpoints, which do not need
        # the script.
        return {key: value for key, value in prepare(name).items() if key != "init_main_from_path"}

    spawn.get_preparation_data = without_script


@functools.lru_cache(1)
def _training_names(count: int) -> list[str]:
    """Return the names of all imported modules that belong to Megatron's training code.

    count: number of all imported modules. The result is cached until this number changes. The cache
        is useful because a run replaces about 26 functions. Without the cache, each replacement
        would search thousands of imported modules.
    """
    return [name for name in sys.modules if name.startswith("megatron.training")]


def replace_training(name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a function of Megatron's training code with `wrap(function)`.

    The function is replaced in every module of the training code that imports it. If a Megatron
    version does not have the function, nothing is changed.
    """
    training_module("training")  # imports all the others
    modules = [sys.modules[key] for key in _training_names(len(sys.modules)) if key in sys.modules]
    originals = [vars(module)[name] for module in modules if name in vars(module)]
    for original in originals[:1]:
        ours = wrap(original)
        for module in modules:
            if vars(module).get(name) is original:
                setattr(module, name, ours)


def mend_config_warning() -> None:
    """Fix Megatron's warning about tensor and expert parallelism without sequence parallelism.

    In Megatron 0.15, `model_parallel_config` calls `warnings.warn` without importing `warnings`, so
    such a config raises a `NameError` instead of printing the warning.
    """
    module = importlib.import_module("megatron.core.model_parallel_config")
    vars(module).setdefault("warnings", warnings)


def keep_compiled_helpers() -> None:
    """If Megatron's compiled dataset helpers can be imported, prevent Megatron from compiling them
    again.

    In Megatron 0.17 to 0.19, the training code always runs `make` to compile the helpers. Wheels
    contain the compiled helpers but no Makefile. In a source checkout, the Makefile uses the
    headers and the module suffix of the first `python3` in PATH, which may be a different Python.
    """
    datasets = importlib.import_module("megatron.core.datasets.utils")
    compiled: Callable[[], None] = functools.partial(
        compile_helpers, Path(str(datasets.__file__)).parent)
    with contextlib.suppress(ImportError):
        importlib.import_module("megatron.core.datasets.helpers_cpp")
        compiled = lambda: None  # noqa: E731
    datasets.compile_helpers = compiled  # type: ignore[attr-defined]


def compile_helpers(folder: Path) -> None:
    """Compile the dataset helpers of a Megatron source checkout for the current Python.

    Raises:
        ValueError: If a package or compiler is missing.
    """
    what = f"Megatron's dataset helpers in {short(str(folder))}, which the first run compiles,"
    if importlib.util.find_spec("pybind11") is None:
        raise ValueError(f"{what} need the package pybind11. Install it with "
                         f"{short(sys.executable)} -m pip install pybind11")
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
    command = ["make", "-C", str(folder), f"LIBEXT={sysconfig.get_config_var('EXT_SUFFIX')}"]
    try:
        done = subprocess.run(command, env={**os.environ, "PATH": path}, capture_output=True,
                              text=True, check=False)
    except FileNotFoundError as error:
        raise ValueError(f"{what} need make and a C++ compiler. Install both, for example with "
                         "apt-get install make g++") from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise ValueError(f"{what} cannot be compiled for this Python: {short(said, 300)}. Install "
                         f"make and a C++ compiler, and try {short(' '.join(command), 300)}")
    importlib.invalidate_caches()


def extend_parse_args(ours: Callable[[Provider | None], Provider],
                      after: Callable[[argparse.Namespace], object] = lambda args: None) -> None:
    """Make Megatron's `parse_args` use the argument provider `ours(provider)` instead of the
    script's own `provider`.

    In Megatron 0.15 to 0.19, the function `pretrain` passes the provider to `parse_args`. From
    Megatron 0.18 on, the script may also pass the provider directly.

    after: function that is called with the parsed arguments.
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
    """A `ValueError` whose message ends by telling the user what to do.

    If Megatron 0.15 to 0.19 cannot build a module of a spec, it raises a new error of the same
    class, to whose message it appends " when instantiating CLASS". Megatron repeats this for each
    level of the spec. `SettingsError` removes the appended text.
    """

    def __init__(self, words: str) -> None:
        super().__init__(_ADDED.sub("", words))


@contextlib.contextmanager
def settings_errors() -> Iterator[None]:
    """Convert a `ValueError` raised inside the block to a `SettingsError`, with its traceback."""
    try:
        yield
    except ValueError as error:
        if type(error) is not ValueError:
            raise
        raise SettingsError(str(error)).with_traceback(error.__traceback__) from error.__cause__
