"""The ways in which this host changes fairseq: functions that replace others, functions that run
once, new fields of settings, and modules seen through another one.
"""

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
_PATCHES: dict[str, list[Callable[[], None]]] = defaultdict(list)  # by module of `compat`


def patch(function: _Function) -> _Function:
    """Run a function once when its module's patches are applied."""
    _PATCHES[function.__module__].append(function)
    return function


def replaces(*places: str) -> Callable[[_Function], _Function]:
    """Put a function in the place of others, each of which it gets as its first argument.

    Args:
        places: paths below fairseq, `checkpoint_utils.load_checkpoint`.
    """
    def register(function: _Function) -> _Function:
        for place in places:
            patch_of = functools.partial(replace, place, function)
            _PATCHES[function.__module__].append(patch_of)
        return function

    return register


def replace(place: str, function: Callable[..., Any]) -> None:
    """See `replaces`. `fairseq_cli.train` may have imported a function by its name."""
    path, _, name = place.rpartition(".")
    owner = resolve_name(f"fairseq.{path}")
    original = getattr(owner, name)
    of_class = inspect.ismethod(original)
    if of_class:  # `function` gets the class next, which may be one derived from the owner
        original = original.__func__

    @functools.wraps(original, updated=())  # under its name it pickles for spawned processes
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    set_name(owner, name, classmethod(replaced) if of_class else replaced)


def set_name(owner: Any, name: str, value: Any) -> None:
    """Set a name of fairseq's, and what `fairseq_cli.train` has imported by it."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    train = sys.modules.get("fairseq_cli.train")
    if getattr(train, name, None) is before:
        setattr(train, name, value)


def apply(module: ModuleType) -> None:
    """Apply the patches of a module of `compat`, in their order."""
    for one in _PATCHES[module.__name__]:
        one()


class Overlay(ModuleType):
    """Stands for `module` inside one other module's namespace.

    A name replaced in it is replaced there alone.
    """

    def __init__(self, module: Any, **names: Any) -> None:
        super().__init__(getattr(module, "__name__", type(module).__name__))
        self.__dict__["_module"] = module
        self.__dict__.update(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)


def flag_metadata(spec: FlagSpec) -> dict[str, str]:
    """What fairseq reads of a field to make the flag of `spec`."""
    const = {"argparse_const": "true"} if spec.kind is bool else {}
    return {"help": spec.help.replace("%", "%%"), **const}


def add_field(settings: type, name: str, kind: Any, default: Any, help: str,
              **metadata: Any) -> None:
    """Give a dataclass of fairseq's, which has fields and a flag for each, one more.

    Instances that exist read the default. Nothing happens where fairseq has the field.

    Args:
        settings: the dataclass.
        kind: type of the field.
        help: text.
        metadata: what else fairseq reads there, e.g. `argparse_const`.
    """
    if name in settings.__dataclass_fields__:  # type: ignore[attr-defined]
        return
    made = make_dataclass(
        settings.__name__,
        [(name, kind, field(default=default, metadata={"help": help, **metadata}))])
    settings.__dataclass_fields__[name] = made.__dataclass_fields__[name]  # type: ignore[attr-defined]
    settings.__annotations__[name] = kind
    setattr(settings, name, default)


def store_in_hydra(group: str, name: str, settings: type) -> None:
    """Let Hydra know a dataclass of fairseq's, with the fields that it has now, by this name."""
    from hydra.core.config_store import ConfigStore

    node: Any = settings()
    node._name = name
    ConfigStore.instance().store(name=name, group=group, node=node, provider="moe_plugin")


# Putting our models and trainer where fairseq looks for its own, once the user dir is loaded.
def stand_for(name: str, model: type, dataclass: type | None) -> None:
    """Let a stock model name and its architectures build `model`, a subclass of that model.

    fairseq 0.12.2 has no way to add flags to a model that is registered. Launch scripts of its
    `moe` branch say `--arch transformer_lm_gpt --moe-freq 2`; without MoE flags the subclass builds
    exactly the stock model.
    """
    from fairseq import models

    stock = models.MODEL_REGISTRY[name]
    if not issubclass(model, stock):
        raise ValueError(  # noqa: TRY004  (a wrong argument of ours)
            f"{model.__name__} cannot stand for {name!r}: it must be a subclass of {stock.__name__}"
        )
    for registry in (models.MODEL_REGISTRY, models.ARCH_MODEL_REGISTRY):
        for key, value in list(registry.items()):
            if value is stock:
                registry[key] = model
    if dataclass is not None:
        models.MODEL_DATACLASS_REGISTRY[name] = dataclass
        store_in_hydra("model", name, dataclass)
        setattr(model, "__dataclass", dataclass)


def use_trainer(trainer: type) -> None:
    """fairseq 0.12.2 names its trainer class in `fairseq_cli.train`, without a registry.
    """
    import fairseq.trainer

    set_name(fairseq.trainer, "Trainer", trainer)


def tell_of_validations() -> None:
    """fairseq 0.12.2 gives a trainer batches to validate, but not what a validation found: the
    trainer of `use_trainer` gets it, once for each.
    """
    train = sys.modules.get("fairseq_cli.train")
    stats_of = getattr(train, "get_valid_stats", None)
    if train is None or stats_of is None:
        return

    def get_valid_stats(cfg: Any, trainer: Any, stats: Any, *args: Any, **kwargs: Any) -> Any:
        if hasattr(trainer, "validated"):  # --model-parallel-size > 1 takes another one
            trainer.validated(stats)
        return stats_of(cfg, trainer, stats, *args, **kwargs)

    train.get_valid_stats = get_valid_stats


def sharding_without_fairscale() -> None:
    """fairseq 0.12.2 asks for fairscale before it builds a model under `--ddp-backend
    fully_sharded`, and when it builds an optimizer under `--zero-sharding os`. The trainer of
    `use_trainer` does both without it.
    """
    import fairseq.distributed
    import fairseq.trainer

    def enable_wrap(_: Any) -> AbstractContextManager[None]:
        return nullcontext()

    set_name(fairseq.distributed, "fsdp_enable_wrap", enable_wrap)
    fairseq.trainer.optim = Overlay(fairseq.trainer.optim, shard_=lambda optimizer, group: None)
