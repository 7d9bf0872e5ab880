"""Every registered name by kind, and whether it runs and is used here."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import time
from typing import Any

import torch

import moe_plugin
from moe_plugin.config import DispatchConfig, GuardConfig, MoEConfig
from moe_plugin.config.lacks import HOSTS, LACKS, OF_HOSTS
from moe_plugin.kernels.block_formats import quantize_mxfp8
from moe_plugin.kernels.expert_ffn import is_stepwise, stepwise_strategy
from moe_plugin.kernels.groups import RowGroups
from moe_plugin.kernels.router import Rule
from moe_plugin.kernels.scores import SOFTMAX
from moe_plugin.planner.choice import SENDS
from moe_plugin.planner.units import show_time
from moe_plugin.records import RowCounts
from moe_plugin.registry import KINDS, Entry
from moe_plugin.run_features import FEATURES
from moe_plugin.tuning.compute_times import ChoiceFiles
from moe_plugin.tuning.prepare_group import DEFAULT_WHEN_UNSET

# commands; the others import fairseq or Megatron
_APART = ("moe_plugin.cli", "moe_plugin.hosts")
_OPTIONAL = {"rich", "triton"}


def import_everything() -> list[dict[str, str]]:
    """Import all modules but hosts and commands, so that every name is registered.

    Returns:
        What failed to import: `module`, `reason`.
    """
    failed = []
    names = [m.name for m in pkgutil.iter_modules(moe_plugin.__path__, "moe_plugin.")]
    while names:
        name = names.pop()
        if name in _APART:
            continue
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name in _OPTIONAL:
                # such modules are imported where the extra is used; the list of packages says that
                # it is missing
                continue
            failed.append({"module": name, "reason": str(error)})
            continue
        except ImportError as error:
            failed.append({"module": name, "reason": str(error)})
            continue
        paths = vars(module).get("__path__", [])  # only packages have one
        names += [m.name for m in pkgutil.iter_modules(paths, f"{name}.")]
    return failed


def registry_rows(device: torch.device) -> dict[str, list[dict[str, Any]]]:
    """By kind, one row per registered name: `name`, `state`, `reason`, `summary`.

    The state is `active` (the default settings use it here), `available` or `not available`.
    """
    used = _defaults(MoEConfig())
    return {
        kind: [_kernel_row(e, device) if kind == "kernel" else _row(e, used.get(kind, set()))
               for e in KINDS[kind]]
        for kind in sorted(KINDS)
    }


def choice_rows() -> list[dict[str, str]]:
    """What `experts.compute=auto` has measured on this machine and kept: load, name of the choice,
    why, how long ago, and how far the measurements that chose it differ.
    """
    return [{"load": key, "name": kept.name, "why": kept.why,
             "age": show_time(max(0.0, time.time() - kept.made)),
             "spread": f"{100 * kept.spread:.0f} %"} for key, kept in ChoiceFiles().listed()]


def dropout_rows() -> list[dict[str, Any]]:
    """By name of `experts.compute`, whether it runs with `experts.dropout` > 0 (in training), clamp
    or offset.

    The state is `on`, or `off` where the strategy named in `reason` takes its place.
    """
    entries = list(KINDS["expert_compute"])
    instead = next(e.name for e in entries if e.value is stepwise_strategy())
    return [{"name": e.name, "state": "on", "reason": None} if is_stepwise(e.value) else
            {"name": e.name, "state": "off", "reason": f"has none: {instead} runs instead"}
            for e in entries]


def unset_rows() -> list[dict[str, str]]:
    """Settings that the group decides where nothing is given: name, value on one node and over
    several.
    """
    return [{"name": path, "one_node": one, "several_nodes": several}
            for path, (one, several) in DEFAULT_WHEN_UNSET.items()]


def send_rows() -> list[dict[str, str]]:
    """How often a token's row may travel: value of `dispatch.send`, whether it is the default, and
    which dispatchers do so.
    """
    able = [entry.name for entry in KINDS["dispatcher"] if entry.value.traits.sends_once]
    every = [entry.name for entry in KINDS["dispatcher"]]
    what = {"rows": ("once for each of its experts", every),
            "ranks": ("once to each rank that has some of them", able),
            "nodes": ("once to each node; without several nodes of several ranks as ranks", able)}
    return [{"name": send, "state": "active" if send == DispatchConfig().send else "available",
             "what": f"{what[send][0]}: {', '.join(what[send][1])}"} for send in SENDS]


def guard_rows() -> list[dict[str, str]]:
    """Checks between ranks, which hosts run: setting, flag, default and what it does."""
    default = GuardConfig()
    return [{"name": GuardConfig.PATH + found.name, "flag": f"--moe-{found.metadata['flag']}",
             "state": str(getattr(default, found.name) or "off"), "what": found.metadata["help"]}
            for found in dataclasses.fields(GuardConfig)]


def run_rows() -> list[dict[str, str]]:
    """What a run may have around its steps: setting, the hosts that have it, and of each other one
    why it has not, and the remedy.
    """
    settings = (*(row.setting for row in FEATURES if row.setting), *OF_HOSTS)
    return [{"name": name, "state": ", ".join(h for h in HOSTS if (name, h) not in LACKS),
             "what": "; ".join(f"{host}: {lack.reason} ({lack.remedy})"
                               for (lacking, host), lack in LACKS.items() if lacking == name)}
            for name in settings]


def _defaults(config: MoEConfig) -> dict[str, set[str]]:
    stored = config.experts.store != "device"
    return {
        "router": {config.router.name},
        "loss": {name for name, weight in config.losses.items() if weight > 0},
        "dispatcher": {config.dispatch.name},
        "all_to_all": ({config.comm.all_to_all} if config.comm.all_to_all
                       else set(DEFAULT_WHEN_UNSET["comm.all_to_all"])),
        "collectives": {config.comm.collectives},
        "experts": {config.experts.kind},
        "expert_compute": {config.experts.compute},
        "cache_policy": {config.experts.cache_policy} if stored else set(),
    }


def _row(entry: Entry, used: set[str]) -> dict[str, Any]:
    reason = entry.why_not()
    state = "not available" if reason else "active" if entry.name in used else "available"
    return {"name": entry.name, "state": state, "reason": reason, "summary": entry.summary}


def _kernel_row(entry: Entry, device: torch.device) -> dict[str, Any]:
    op = entry.value
    implementations = [{"name": name, "state": state, "reason": reason}
                       for name, state, reason in implementation_rows(op, device)]
    return {**_row(entry, {entry.name}), "implementations": implementations}


def implementation_rows(op: Any, device: torch.device) -> list[tuple[str, str, str | None]]:
    """(name, state, reason) of each implementation for `sample_arguments` on `device`."""
    args = sample_arguments(op, device)
    if args is None:
        return [(name, "available", "chosen by its arguments") for name in op.names()]
    chosen = op.choose(*args)
    why_not = {name: op.why_not(name, *args) for name in op.names()}
    return [(name, "active" if name == chosen else "not available" if reason else "available",
             reason) for name, reason in why_not.items()]


def sample_arguments(op: Any, device: torch.device) -> list[Any] | None:
    """Small arguments for an operation, by the parameter names of its reference.

    4 tokens, 2 choices, 2 experts of 4 rows each, widths 16; float32. Of operations in block-scaled
    formats 2 experts of 32 rows each, widths 64; bfloat16, as torch's product wants. None where an
    operation has a parameter that this table does not know. Names: see the legend of
    `kernels.rows`.
    """
    ids_TK = torch.tensor([[0, 1], [1, 0], [0, 1], [1, 0]], device=device)
    source_R = torch.tensor([0, 3, 4, 7, 1, 2, 5, 6], device=device)
    position_TK = torch.empty(8, dtype=torch.int64, device=device).index_copy_(
        0, source_R, torch.arange(8, device=device)).view(4, 2)
    rows_RD, ones_L = torch.ones(8, 16, device=device), torch.ones(2, 16, 16, device=device)
    known = {
        **dict.fromkeys(("x_TD", "grad_TD"), torch.ones(4, 16, device=device)),
        **dict.fromkeys(("rows_RD", "x", "x_RD", "x_RI", "y_RI", "h_RF", "grad",
                         "grad_RO", "also_RO"), rows_RD),
        **dict.fromkeys(("w_LIO", "v_LIO", "w_LDF", "v_LDF", "w_LFD", "into_LIO"), ones_L),
        **dict.fromkeys(("scores_TE", "logits_TE"), torch.rand(4, 2, device=device)),
        **dict.fromkeys(("b_LO", "b_LF", "v_bias_LF", "token_R", "gate_RF", "scale_R", "x_token_R",
                         "grad_token_R", "chosen_TK", "bias_E", "into")),
        "weights_TK": torch.full((4, 2), 0.5, device=device),
        "grad_weights_TK": torch.ones(4, 2, device=device),
        "values_CN": torch.ones(2, 8, device=device), "index": source_R,
        "ids_TK": ids_TK, "ids_N": ids_TK.flatten(), "source_R": source_R,
        "position_TK": position_TK, "mask_T": torch.ones(4, dtype=torch.bool, device=device),
        "lse_T": torch.ones(4, device=device), "grad_z": torch.ones((), device=device),
        "grad_importance_E": torch.ones(2, device=device),
        "codes_RD": rows_RD.to(torch.float8_e4m3fn), "scales_RB": torch.ones(8, 1, device=device),
        "codes": rows_RD.to(torch.float8_e4m3fn), "scales": torch.ones(8, 1, device=device),
        "codes_LIO": ones_L.to(torch.float8_e4m3fn),
        "scales_LHW": torch.ones(2, 1, 1, device=device), "precision": "ieee",
        **dict.fromkeys(("x_blocks", "grad_blocks"), quantize_mxfp8(
            torch.ones(64, 64, device=device))),
        "w_blocks": quantize_mxfp8(torch.ones(2, 64, 64, device=device)),
        "groups": RowGroups(RowCounts([4, 4]), device), "dtype": torch.float32,
        "activation": "gelu",
        "lengths_L": torch.tensor([4, 4], device=device), "height": 4, "total": 8, "least": 0,
        "x_N": torch.ones(8, device=device), "record_M": torch.tensor([1, 0], device=device),
        **dict.fromkeys(("pages_SP", "host_SP"), torch.ones(3, 4, device=device)), "length": 8,
        "enough": torch.tensor(True, device=device),
        "top_k": 2, "k": 2, "experts": 2, "outer": 2, "inner": 4, "block": 16, "complete": False,
        "rule": Rule(2, True, SOFTMAX), "sure": True,
    }
    names = list(inspect.signature(op.implementation("torch")).parameters)
    if "x_blocks" in names:
        known |= {"groups": RowGroups(RowCounts([32, 32]), device), "dtype": torch.bfloat16}
    return [known[name] for name in names] if set(names) <= set(known) else None
