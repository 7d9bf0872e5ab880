"""Make `--user-dir` work with this package even if other code has already imported the package."""

from __future__ import annotations

import argparse
import functools
import importlib
import logging
import os
import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from moe_plugin.config.flags import CONFIG_FLAG, TRUST_FLAG, file_settings, flag_specs
from moe_plugin.config.tree import describes_layers
from moe_plugin.hosts.fairseq.compat.launch import errors_of_use_in_one_line
from moe_plugin.hosts.fairseq.compat.patching import add_field, patch, replaces
from moe_plugin.utils.folder_lock import hold_folder, release_all
from moe_plugin.utils.messages import short
from moe_plugin.utils.yaml_file import bundled_folder, inline, read_yaml, source_of

# All settings of the running command. Needed to lock --save-dir, so that one run at a time writes.
_SETTINGS: ContextVar[Any] = ContextVar("all settings of the command", default=None)


@replaces("distributed.utils.call_main")
def settings_are_known(original: Callable[..., Any], cfg: Any, main: Callable[..., Any],
                       **kwargs: Any) -> Any:
    """Store the settings of the current command for `folder_of_one_run`.

    `folder_of_one_run` needs the settings because fairseq <= 0.12.3 does not pass them to
    `verify_checkpoint_directory`.
    """
    return original(cfg, functools.partial(_with_settings, main), **kwargs)


def _with_settings(main: Callable[..., Any], cfg: Any, **kwargs: Any) -> Any:
    _SETTINGS.set(cfg)
    try:
        return main(cfg, **kwargs)
    finally:
        _SETTINGS.set(None)
        release_all()


@replaces("checkpoint_utils.verify_checkpoint_directory")
def folder_of_one_run(original: Callable[..., None], save_dir: str) -> None:
    """Ensure that only one run at a time writes to a folder.

    fairseq <= 0.12.3 allows several runs to write to the same folder. To test whether the folder is
    writable, fairseq creates and removes a file with a fixed name. Runs that start at the same time
    would therefore remove each other's file. The first rank calls this function before training.
    The folder stays locked until the command ends.
    """
    from moe_plugin.config.flags import run_from_flags
    from moe_plugin.hosts.fairseq.translate import flag_values

    cfg = _SETTINGS.get()
    if cfg is None:
        hold_folder(save_dir)
    elif cfg.checkpoint.no_save:
        original(save_dir)
    else:
        settings = run_from_flags(flag_values(cfg.model))
        hold_folder(save_dir, settings.observe.take_over_folder)


logger = logging.getLogger(__name__)
NAME = "moe_plugin"
_FREQUENCIES = ("moe_freq", "encoder_moe_freq", "decoder_moe_freq")


@replaces("utils.import_user_module")
def own_user_dir(original: Callable[..., None], args: Any) -> None:
    """Register the models in the `--user-dir` folder even if the package has already been imported.

    fairseq <= 0.12.3 imports a user directory only once. With this patch, both
    `--user-dir moe_plugin` and the path of the installed package work. The name and the path also
    work in spawned processes, and in programs that have already imported the package. The name
    `moe_plugin` refers to the installed package, even if the current folder contains another copy
    of the package. The path of another copy raises an error.
    """
    given = getattr(args, "user_dir", None)
    if given is None or os.path.basename(os.path.abspath(given)) != NAME:
        try:
            return original(args)
        except FileNotFoundError as error:
            raise ValueError(f"--user-dir {short(given)} does not exist. Use --user-dir {NAME}, or "
                             "the path of a folder") from error
    home = _checked_home(given)
    original(argparse.Namespace(user_dir=home))
    importlib.import_module("moe_plugin.hosts.fairseq.register")


def _checked_home(given: str) -> str:
    import moe_plugin

    home = os.path.dirname(os.path.abspath(moe_plugin.__file__))
    if not os.path.exists(given) or os.path.realpath(given) == os.path.realpath(home):
        return home
    root = os.path.dirname(os.path.abspath(given))
    if given != NAME:
        raise ValueError(
            f"--user-dir {given!r} is not the installed copy of moe_plugin, which is at {home!r}. "
            "Use --user-dir moe_plugin for the installed copy, or install the given copy with: "
            f"pip install -e {root}")
    logger.warning("--user-dir moe_plugin uses the installed package at %s, not the copy in this "
                   "folder; to use the copy, run: pip install -e %s", home, root)
    return home


def moe_settings(cfg: Any) -> str | None:
    """Remove the Hydra config group `moe` from fairseq's settings, and return the value for
    `model.moe_config`: the path of the file given there, or the text of all settings (`inline`).

    The group is read like a file. If both are given, the file overrides the group. A file that sets
    `num_experts` describes the layers completely, so that the group has no effect then.

    Raises:
        ValueError: If a part of the group that was set on the command line contradicts the file, or
            if the group contains unknown keys, wrong types or invalid values.
    """
    group: Any = cfg.get("moe")
    model: Any = cfg.model if isinstance(cfg.get("model"), DictConfig) else {}
    path: str | None = model.get(CONFIG_FLAG.dest)
    cfg.moe = None
    if not group:
        return path
    values: Any = OmegaConf.to_container(group, resolve=True, enum_to_str=True)
    text, trusted = inline(values), {TRUST_FLAG.dest: model.get(TRUST_FLAG.dest)}
    in_group = file_settings({CONFIG_FLAG.dest: text, **trusted})
    if not path:
        return text
    names = [name for name in _overrides() if name.split(".")[0] == "moe"]
    if "moe" in names:
        raise ValueError("the command line chooses a group moe, but model.moe_config="
                         f"{short(path)} names a file. Use only one of the two")
    in_file = file_settings({CONFIG_FLAG.dest: path, **trusted})
    chosen = {name: value for name, value in in_group.items() if any(
        f"moe.{name}.".startswith(f"{said}.") or said.startswith(f"moe.{name}.")
        for said in names)}
    for name, value in chosen.items():
        if in_file.get(name, value) != value:
            raise ValueError(
                f"moe.{name}={short(value)} contradicts {name}={short(in_file[name])} in "
                f"{source_of(path)}. Remove one of the two, or override the file with a flag under "
                "model (docs/config.md)")
    rest = {} if describes_layers(in_file) else in_group
    return inline({**rest, **in_file, **chosen}) if rest or chosen else path


def _overrides() -> list[str]:
    """Return the names that Hydra's command line sets, such as `moe.router.top_k`."""
    from hydra.core.hydra_config import HydraConfig

    words = HydraConfig.get().overrides.task if HydraConfig.initialized() else []
    return [word.lstrip("+~").partition("=")[0].partition("@")[0] for word in words]


def _take_width(model: Any, path: str | None) -> None:
    width = read_yaml(path).get("model_dim") if path else None
    if width and "decoder_embed_dim" not in model:
        with open_dict(model):
            for name in ("embed", "input", "output"):
                model[f"decoder_{name}_dim"] = width


def _explicit(model: Any) -> set[str]:
    """Return the names under `model` that the user set, before fairseq fills in the default values.

    Settings on the command line override the YAML file onto which they are composed. If the command
    line chooses the group or the file, only names on the command line are explicit. If the default
    values are already filled in, the set is empty.
    """
    said = _overrides()
    chosen = "moe" in said or f"model.{CONFIG_FLAG.dest}" in said
    filled = all(spec.dest in model for spec in flag_specs())
    return {name for name in model if not filled and (not chosen or f"model.{name}" in said)}


def _check_data(cfg: Any) -> None:
    task = cfg.get("task")
    if isinstance(task, DictConfig) and "data" in task and task.data is None:
        raise ValueError("task.data is missing. Add task.data=FOLDER, the output folder of "
                         "fairseq-preprocess")


@replaces("dataclass.initialize.add_defaults")
def user_dir_before_defaults(original: Callable[..., None], cfg: Any) -> None:
    """Import the user directory before the default values of models are filled in.

    `fairseq-hydra-train` (<= 0.12.3) fills in default values before it imports the user directory,
    which defines the models. If the `model.moe_config` file or the group `moe` contains the width
    of the layers, this width is treated as set by the user.
    """
    from fairseq import utils

    common = cfg.get("common")
    if common is not None and common.get("user_dir"):
        utils.import_user_module(argparse.Namespace(user_dir=common.user_dir))
    with errors_of_use_in_one_line():
        path = moe_settings(cfg)
        explicit = set[str]()
        if isinstance(cfg.get("model"), DictConfig):
            explicit = _explicit(cfg.model)
            _take_width(cfg.model, path)
    original(cfg)
    with errors_of_use_in_one_line(cfg):  # hydra would otherwise add its own lines
        _check_data(cfg)
        if path and CONFIG_FLAG.dest not in (cfg.get("model") or {}):
            raise ValueError("the group moe needs a model with experts. Use common.user_dir="
                             "moe_plugin and model._name=moe_transformer_lm")
        if path:
            from moe_plugin.hosts.fairseq.translate import check_flags

            cfg.model[CONFIG_FLAG.dest] = path
            check_flags(cfg.model, explicit)


@patch
def group_in_hydra() -> None:
    """Register the Hydra config group `moe` (node `base`) for `fairseq-hydra-train`.

    The group is registered early, because Hydra needs it before fairseq imports a user directory.
    """
    from fairseq.dataclass.configs import FairseqConfig

    from moe_plugin.config import register_hydra

    add_field(FairseqConfig, "moe", Any, None, "settings of the MoE layers (group moe)")
    register_hydra()


def search_bundled_groups(name: str) -> None:
    """Let Hydra find the groups in `configs`, such as `moe`, after those in the user's folder.

    fairseq <= 0.12.3 also finds no defaults for a `--config-name` that is inside of a folder.
    """
    from fairseq.dataclass.configs import FairseqConfig
    from hydra._internal.utils import get_args
    from hydra.core.config_search_path import ConfigSearchPath
    from hydra.core.config_store import ConfigStore
    from hydra.core.plugins import Plugins
    from hydra.plugins.search_path_plugin import SearchPathPlugin

    class BundledGroups(SearchPathPlugin):
        def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
            for folder in filter(None, (get_args().config_dir, bundled_folder())):
                search_path.append("moe_plugin", f"file://{os.path.abspath(folder)}")

    Plugins.instance().register(BundledGroups)
    group, _, base = name.rpartition("/")
    if group:
        ConfigStore.instance().store(name=base, group=group, node=FairseqConfig, package="_global_")


@replaces("models.build_model")
def models_of_the_user_dir(original: Callable[..., Any], cfg: Any, *args: Any,
                           **kwargs: Any) -> Any:
    """Raise an error if a model with experts is used without the user directory. The model may come
    from a checkpoint.

    Without this check, fairseq 0.12.2 fails with a KeyError or a list of unexpected parameters.
    """
    name = getattr(cfg, "_name", None) or getattr(cfg, "arch", None) or ""
    if "moe_plugin.hosts.fairseq.registered" not in sys.modules and (
            name.startswith("moe_") or any(getattr(cfg, freq, 0) for freq in _FREQUENCIES)):
        raise ValueError(f"model {short(name)} has experts, which fairseq alone does not support. "
                         "Add --user-dir moe_plugin")
    return original(cfg, *args, **kwargs)
