"""Prevent files that Megatron loads from executing code.

The restrictions apply unless the user starts the run with `--trust-checkpoint`. Megatron, torch and
Transformer Engine open files in many functions, which differ between versions. However, all of
these functions call `torch.load`, `pickle.load`, `pickle.loads` or `numpy.load`. Restricting these
four functions is therefore sufficient.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import json
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch

from moe_plugin.checkpoint import trust
from moe_plugin.checkpoint.formats.megatron.torch_dist import ALLOWED
from moe_plugin.hosts.megatron.compat.loaders import replace_tokenizer_builder
from moe_plugin.hosts.megatron.compat.settings import replace_training, script_arguments
from moe_plugin.utils.messages import short

# prefixes of the names of modules that unpickle the contents of files; some modules of these
# packages also unpickle objects that ranks send to each other
_READERS = ("megatron.", "transformer_engine.", "torch.distributed.checkpoint.filesystem",
            "numcodecs.")
# classes in the extra states of fp8 layers, which are pickles stored in tensors
_RECIPE = "transformer_engine.common.recipe."
_EXTRA_STATE = {
    *(_RECIPE + name for name in (
        "DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling",
        "NVFP4BlockScaling", "Format", "_FormatHelper", "MMParams", "QParams")),
    "megatron.core.extensions.transformer_engine.TEDelayedScaling",
    "torch._utils._rebuild_tensor_v2", "torch.storage._load_from_bytes",
    "torch.storage.UntypedStorage"}
_LISTED = {*ALLOWED, *_EXTRA_STATE}
_OURS = "megatron.", "moe_plugin."
# refusals in this process: Megatron and torch replace these errors with other errors, or end the
# process with status 0, so the launcher raises the first refusal again
refused: list[trust.UntrustedFile] = []


def trusts_files() -> bool:
    """Return True if the user allows the run to load files that can execute code.

    The function also searches the command line for the flag, because Megatron loads a checkpoint
    before it has parsed all arguments. (Some arguments are read from the checkpoint.)
    """
    return trust.FLAG in sys.argv or bool(script_arguments().get("trust_checkpoint"))


def restrict_loads() -> None:
    """Until the process ends, restrict loaded files to plain values and known classes."""
    torch.load = torch.serialization.load = _torch_load
    pickle.load, pickle.loads = _limited(pickle.load), _limited(pickle.loads)
    numpy.load = _numpy_load(numpy.load)
    replace_training("load_args_from_checkpoint", _same_spec)
    replace_tokenizer_builder(_known_tokenizer)


@contextlib.contextmanager
def _noted() -> Iterator[None]:
    try:
        yield
    except trust.UntrustedFile as error:
        refused.append(error)
        raise


@functools.wraps(trust.torch_load)
def _torch_load(f: Any, *args: Any, **options: Any) -> Any:
    if trusts_files():
        return trust.torch_load(f, *args, **options)
    given = inspect.signature(trust.torch_load).bind(f, *args, **options).arguments
    given.update(given.pop("pickle_load_args", {}), pickle_module=None)
    name = getattr(f, "name", "an entry of a checkpoint" if hasattr(f, "read") else f)
    with _noted():
        return trust.load(given.pop("f"), (), str(name), **given)


def _is_unlimited() -> bool:
    """Return True if the module that called the wrapped function may unpickle any class."""
    reader = str(sys._getframe(2).f_globals.get("__name__"))
    return not reader.startswith(_READERS) or trusts_files()


def _limited(load: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a load function of `pickle` so that modules that read files load only known classes."""
    @functools.wraps(load)
    def call(source: Any, *args: Any, **options: Any) -> Any:
        if _is_unlimited():
            return load(source, *args, **options)
        stream = source if hasattr(source, "read") else io.BytesIO(source)
        with _noted():
            return trust.Unpickler(stream, _LISTED, getattr(stream, "name", "a value")).load()

    return call


def _numpy_load(load: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `numpy.load` so that Megatron's modules cannot load pickled objects.

    The index files of datasets contain arrays of numbers, so pickled objects are not needed.
    """
    @functools.wraps(load)
    def call(file: Any, *args: Any, **options: Any) -> Any:
        if _is_unlimited():
            return load(file, *args, **options)
        with _noted():
            try:
                return load(file, *args, **{**options, "allow_pickle": False})
            except ValueError as error:
                if "pickle" not in str(error):
                    raise
                raise trust.UntrustedFile(f"file {short(str(file))}", ["Python objects"]) from error

    return call


def _same_spec(read: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the function of Megatron that reads arguments from a checkpoint, and check `--spec`.

    Megatron imports the module that `--spec` names. A spec from the checkpoint is accepted only if
    it equals the spec on the command line, or if it names a module of Megatron or of this package.
    """
    @functools.wraps(read)
    def call(args: Any, *more: Any, **named: Any) -> Any:
        given = args.spec
        done = read(args, *more, **named)
        module = args.spec[0] if isinstance(args.spec, list | tuple) and args.spec else args.spec
        if module and args.spec != given and not str(module).startswith(_OURS) \
                and not trusts_files():
            raise trust.UntrustedFile("the checkpoint, in its arguments,",
                                      [f"--spec {short(args.spec)}"])
        return done

    return call


def _known_tokenizer(build: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Megatron's function that builds a tokenizer from the metadata in a JSON file, and check
    the metadata.

    Some versions of Megatron import the module that is named in the metadata. The module is
    accepted only if it belongs to Megatron or to this package. Metadata that a script passes
    directly are not checked.
    """
    @functools.wraps(build)
    def call(tokenizer_path: Any = None, metadata_path: Any = None, **options: Any) -> Any:
        path = metadata_path or vars(sys.modules[build.__module__])["_get_metadata_path"](
            tokenizer_path)
        if isinstance(path, str) and os.path.isfile(path) and not trusts_files():
            with open(path, encoding="utf-8") as stream, _noted():
                module = str(json.load(stream).get("class_path") or "megatron.core")
                if not module.startswith(_OURS):
                    raise trust.UntrustedFile(f"tokenizer metadata {short(path)}", [module])
        return build(tokenizer_path, metadata_path, **options)

    return call
