"""No file that Megatron loads runs code, unless the run has `--trust-checkpoint`.

Megatron, torch and Transformer Engine open files in many places, which differ between versions. All
of them call `torch.load`, `pickle.load`, `pickle.loads` or `numpy.load`, so the limit is there.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import pickle
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch

from moe_plugin.checkpoint import trust
from moe_plugin.checkpoint.formats.megatron.torch_dist import ALLOWED
from moe_plugin.hosts.megatron.compat.settings import replace_training, script_arguments
from moe_plugin.utils.messages import short

# the beginnings of the modules that unpickle what is in files, among others of these packages that
# unpickle what ranks send to each other
_READERS = ("megatron.", "transformer_engine.", "torch.distributed.checkpoint.filesystem",
            "numcodecs.")
# in the extra states of fp8 layers, which are pickles in tensors; torch's own load is restricted
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
# what was refused in this process: Megatron and torch make other errors of it, or end the process
# with status 0
refused: list[trust.UntrustedFile] = []


def trusts_files() -> bool:
    """Whether the run loads files that could run code. The command line says it before Megatron has
    parsed its arguments, some of which it takes from a checkpoint.
    """
    return trust.FLAG in sys.argv or bool(script_arguments().get("trust_checkpoint"))


def restrict_loads() -> None:
    """Restrict the loading of files to plain values and listed classes; stays for the life of the
    process.
    """
    torch.load = torch.serialization.load = _torch_load
    pickle.load, pickle.loads = _limited(pickle.load), _limited(pickle.loads)
    numpy.load = _numpy_load(numpy.load)
    replace_training("load_args_from_checkpoint", _same_spec)


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
    """Whether the caller of the function that asks may unpickle anything."""
    reader = str(sys._getframe(2).f_globals.get("__name__"))
    return not reader.startswith(_READERS) or trusts_files()


def _limited(load: Callable[..., Any]) -> Callable[..., Any]:
    """`pickle.load` or `pickle.loads`, which reads listed classes only for the modules that read
    files.
    """
    @functools.wraps(load)
    def call(source: Any, *args: Any, **options: Any) -> Any:
        if _is_unlimited():
            return load(source, *args, **options)
        stream = source if hasattr(source, "read") else io.BytesIO(source)
        with _noted():
            return trust.Unpickler(stream, _LISTED, getattr(stream, "name", "a value")).load()

    return call


def _numpy_load(load: Callable[..., Any]) -> Callable[..., Any]:
    """`numpy.load` without pickles in Megatron's modules: the indexes of its data sets are arrays
    of numbers.
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
    """Megatron's reading of arguments from a checkpoint, whose `--spec` names a module to import:
    one of the command's, of Megatron or of this package.
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
