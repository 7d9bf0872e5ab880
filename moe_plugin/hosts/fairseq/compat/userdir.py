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

from moe_plugin.hosts.fairseq.compat.launch import errors_of_use_in_one_line
from moe_plugin.hosts.fairseq.compat.patching import add_field, patch, replaces
from moe_plugin.utils.folder_lock import hold_folder, release_all
from moe_plugin.utils.messages import short
from moe_plugin.utils.yaml_file import read_yaml

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


def take_moe_group(cfg: Any) -> None:
    """Convert the settings in the Hydra config group `moe` to model flags. Flags that are already
    set take precedence over the group.

    Raises:
        ValueError: If the group contains unknown keys, wrong types or invalid values, or if the
            model has no experts.
    """
    from moe_plugin.config import flatten, from_dict, of_layer, of_run, run_from_dict
    from moe_plugin.config.flags import CONFIG_FLAG, flag_texts
    from moe_plugin.config.tree import without_hosts

    group = cfg.get("moe")
    if group is None:
        return
    cfg.moe = None
    given: Any = OmegaConf.to_container(group, resolve=True)
    values = without_hosts(given)
    from_dict(of_layer(values))  # its errors name keys, types and bounds
    run_from_dict(of_run(values))
    if CONFIG_FLAG.dest not in cfg.model:
        raise ValueError("the group moe needs a model with experts. Use common.user_dir=moe_plugin "
                         "and model._name=moe_transformer_lm")
    settings = flatten(values)
    if not settings.get("experts.hidden_dim"):
        settings.pop("experts.hidden_dim", None)  # fairseq's inner width is used
    for name, text in flag_texts(settings).items():
        if cfg.model.get(name) is None:
            cfg.model[name] = text


def _take_width(cfg: Any) -> None:
    model = cfg.get("model")
    path = model.get("moe_config") if isinstance(model, DictConfig) else None
    width = read_yaml(path).get("model_dim") if path else None
    if width and "decoder_embed_dim" not in model:
        with open_dict(model):
            for name in ("embed", "input", "output"):
                model[f"decoder_{name}_dim"] = width


def _check_data(cfg: Any) -> None:
    task = cfg.get("task")
    if isinstance(task, DictConfig) and "data" in task and task.data is None:
        raise ValueError("task.data is missing. Add task.data=FOLDER, the output folder of "
                         "fairseq-preprocess")


@replaces("dataclass.initialize.add_defaults")
def user_dir_before_defaults(original: Callable[..., None], cfg: Any) -> None:
    """Import the user directory before the default values of models are filled in.

    `fairseq-hydra-train` (<= 0.12.3) fills in default values before it imports the user directory,
    which defines the models. If the `model.moe_config` file contains the width of the layers, this
    width is treated as set by the user.
    """
    from fairseq import utils

    common = cfg.get("common")
    if common is not None and common.get("user_dir"):
        utils.import_user_module(argparse.Namespace(user_dir=common.user_dir))
    with errors_of_use_in_one_line(cfg):
        _take_width(cfg)
    original(cfg)
    with errors_of_use_in_one_line(cfg):  # hydra would otherwise add its own lines
        _check_data(cfg)
        take_moe_group(cfg)


@patch
def group_in_hydra() -> None:
    """Register the Hydra config group `moe` (node `base`) for `fairseq-hydra-train`.

    The group is registered early, because Hydra needs it before fairseq imports a user directory.
    """
    from fairseq.dataclass.configs import FairseqConfig

    from moe_plugin.config import register_hydra

    add_field(FairseqConfig, "moe", Any, None, "settings of the MoE layers (group moe)")
    register_hydra()


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
