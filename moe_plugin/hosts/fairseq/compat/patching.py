"""Helpers for patches: replace functions, run each patch once, add settings, overlay modules."""

from __future__ import annotations

import functools
import inspect
import sys
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import field, make_dataclass
from pkgutil import resolve_name
from types import ModuleType
from typing import Any, TypeVar

from moe_plugin.config.flags import FlagSpec

_Function = TypeVar("_Function", bound=Callable[..., Any])
_PATCHES: dict[str, list[Callable[[], None]]] = defaultdict(list)  # by name of the compat module


def patch(function: _Function) -> _Function:
    """Register a function as a patch that runs once, when its module's patches are applied."""
    _PATCHES[function.__module__].append(function)
    return function


def replaces(*places: str) -> Callable[[_Function], _Function]:
    """Decorator that registers a function as the replacement for one or more functions in fairseq.

    The replacement receives the original function as its first argument.

    Args:
        places: dotted paths inside fairseq, such as `checkpoint_utils.load_checkpoint`.
    """
    def register(function: _Function) -> _Function:
        for place in places:
            patch_of = functools.partial(replace, place, function)
            _PATCHES[function.__module__].append(patch_of)
        return function

    return register


def replace(path_of_name: str, function: Callable[..., Any]) -> None:
    """Replace a single function in fairseq. See `replaces`.

    `fairseq_cli.train` may have imported the function by name, so it is also replaced there.
    """
    path, _, name = path_of_name.rpartition(".")
    owner = resolve_name(f"fairseq.{path}")
    original = getattr(owner, name)
    of_class = inspect.ismethod(original)
    if of_class:  # `function` receives the class next, which may be a subclass of the owner
        original = original.__func__

    @functools.wraps(original, updated=())  # the original name lets spawned processes unpickle it
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    set_name(owner, name, classmethod(replaced) if of_class else replaced)


def set_name(owner: Any, name: str, value: Any) -> None:
    """Set a name in a fairseq module, and in `fairseq_cli.train` if the name is imported there."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    train = sys.modules.get("fairseq_cli.train")
    if getattr(train, name, None) is before:
        setattr(train, name, value)


def apply(module: ModuleType) -> None:
    """Apply all patches of a module in `compat`, in the order in which they were registered."""
    for apply_patch in _PATCHES[module.__name__]:
        apply_patch()


class Overlay(ModuleType):
    """A copy of a module or object in which some names are replaced.

    Code that uses the overlay sees the replacements. The original module or object does not change.
    """

    def __init__(self, module: Any, **names: Any) -> None:
        super().__init__(getattr(module, "__name__", type(module).__name__))
        self.__dict__["_module"] = module
        self.__dict__.update(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)


def flag_metadata(spec: FlagSpec) -> dict[str, str]:
    """Return the metadata from which fairseq creates a flag for the setting `spec`."""
    const = {"argparse_const": "true"} if spec.kind is bool else {}
    return {"help": spec.help.replace("%", "%%"), **const}


def add_field(settings: type, name: str, value_type: Any, default: Any, help: str,
              **metadata: Any) -> None:
    """Add a field to one of fairseq's dataclasses. fairseq creates a flag for the field.

    In existing instances, the new field has its default value. If the dataclass already has this
    field, nothing is changed.

    Args:
        settings: the dataclass.
        default: default value.
        metadata: additional metadata that fairseq reads, for example `argparse_const`.
    """
    if name in settings.__dataclass_fields__:  # type: ignore[attr-defined]
        return
    made = make_dataclass(
        settings.__name__,
        [(name, value_type, field(default=default, metadata={"help": help, **metadata}))])
    settings.__dataclass_fields__[name] = made.__dataclass_fields__[name]  # type: ignore[attr-defined]
    settings.__annotations__[name] = value_type
    setattr(settings, name, default)


def store_in_hydra(group: str, name: str, settings: type) -> None:
    """Register a fairseq dataclass in Hydra, including fields that were added to it."""
    from hydra.core.config_store import ConfigStore

    node: Any = settings()
    node._name = name
    ConfigStore.instance().store(name=name, group=group, node=node, provider="moe_plugin")


# Replace fairseq's models and trainer by ours, after the user directory is loaded.
def stand_for(name: str, model: type, dataclass: type | None) -> None:
    """Make fairseq build `model` whenever a standard model or one of its architectures is
    requested. `model` must be a subclass of the standard model.

    In fairseq 0.12.2, flags cannot be added to models that are already registered. However, launch
    scripts for fairseq's `moe` branch pass MoE flags to standard architectures
    (`--arch transformer_lm_gpt --moe-freq 2`). Without MoE flags, the subclass builds exactly the
    same model as the standard class.
    """
    from fairseq import models

    stock = models.MODEL_REGISTRY[name]
    if not issubclass(model, stock):
        raise ValueError(  # noqa: TRY004  (an error of our own code, not of a user)
            f"{model.__name__} cannot replace {name!r}: it must be a subclass of {stock.__name__}")
    for registry in (models.MODEL_REGISTRY, models.ARCH_MODEL_REGISTRY):
        for key, value in list(registry.items()):
            if value is stock:
                registry[key] = model
    if dataclass is not None:
        models.MODEL_DATACLASS_REGISTRY[name] = dataclass
        store_in_hydra("model", name, dataclass)
        setattr(model, "__dataclass", dataclass)


def use_trainer(trainer: type) -> None:
    """Make fairseq use a different trainer class. fairseq 0.12.2 looks up its trainer class in
    `fairseq_cli.train`.
    """
    import fairseq.trainer

    set_name(fairseq.trainer, "Trainer", trainer)


def tell_of_validations() -> None:
    """After each validation, call the trainer's method `validated` with the results.

    fairseq 0.12.2 passes only the batches of a validation to the trainer, not the results.
    """
    train = sys.modules.get("fairseq_cli.train")
    stats_of = getattr(train, "get_valid_stats", None)
    if train is None or stats_of is None:
        return

    def get_valid_stats(cfg: Any, trainer: Any, stats: Any, *args: Any, **kwargs: Any) -> Any:
        if hasattr(trainer, "validated"):  # --model-parallel-size > 1 uses another trainer
            trainer.validated(stats)
        return stats_of(cfg, trainer, stats, *args, **kwargs)

    train.get_valid_stats = get_valid_stats  # type: ignore[attr-defined]


def sharding_without_fairscale() -> None:
    """Remove fairseq's check that fairscale is installed when sharding is used. `MoETrainer` shards
    without fairscale.

    fairseq 0.12.2 imports fairscale in two cases: before it builds a model with
    `--ddp-backend fully_sharded`, and when it builds an optimizer with `--zero-sharding os`.
    """
    import fairseq.distributed
    import fairseq.trainer

    def enable_wrap(_: Any) -> AbstractContextManager[None]:
        return nullcontext()

    set_name(fairseq.distributed, "fsdp_enable_wrap", enable_wrap)
    fairseq.trainer.optim = Overlay(fairseq.trainer.optim, shard_=lambda optimizer, group: None)
