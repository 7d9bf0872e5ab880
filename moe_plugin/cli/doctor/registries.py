"""Every registered name by kind, and what becomes of it here."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from typing import Any

import torch

import moe_plugin
from moe_plugin.config import MoEConfig
from moe_plugin.kernels.groups import Groups
from moe_plugin.registry import KINDS, Entry
from moe_plugin.tuning import compute_tuner as auto

# commands; the others import fairseq or Megatron
_APART = ("moe_plugin.cli", "moe_plugin.hosts", "moe_plugin.models")
_OPTIONAL = {"triton"}


def import_everything() -> list[dict[str, str]]:
    """Import all rooms but hosts and commands, so that every registration has happened. Returns
    what failed: module, reason.
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
                # rooms that need an extra are imported where it is used; the package list says that
                # it is missing
                continue
            failed.append({"module": name, "reason": str(error)})
            continue
        except ImportError as error:
            failed.append({"module": name, "reason": str(error)})
            continue
        names += [m.name for m in pkgutil.iter_modules(getattr(module, "__path__", []), name + ".")]
    return failed


def registry_rows(device: torch.device) -> dict[str, list[dict[str, Any]]]:
    """By kind: name, state (active: the default config uses it here; available; not available),
    reason, summary.
    """
    used = _defaults(MoEConfig())
    rows = {}
    for kind in sorted(KINDS):
        entries = [
            _kernel_row(e, device) if kind == "kernel" else _row(e, used.get(kind, set()))
            for e in KINDS[kind]
        ]
        rows[kind] = entries
    return rows


def choice_rows() -> list[dict[str, str]]:
    """What `experts.compute=auto` has measured on this machine: load, name of the choice, why."""
    return [{"load": key, "name": choice.name, "why": choice.why}
            for key, choice in auto.CHOICES.listed()]


def _defaults(config: MoEConfig) -> dict[str, set[str]]:
    return {
        "router": {config.router.name},
        "loss": {name for name, weight in config.losses.items() if weight > 0},
        "dispatcher": {config.dispatch.name},
        "all_to_all": {config.comm.all_to_all},
        "experts": {config.experts.kind},
        "expert_compute": {config.experts.compute},
        # r = S, where experts are cut, which is r = 1 where they are not
        "layout": {"sliced", "whole"},
    }


def _row(entry: Entry, used: set[str]) -> dict[str, Any]:
    reason = entry.why_not()
    state = "not available" if reason else "active" if entry.name in used else "available"
    return {"name": entry.name, "state": state, "reason": reason, "summary": entry.summary}


def _kernel_row(entry: Entry, device: torch.device) -> dict[str, Any]:
    op = entry.value
    implementations = [{"name": name, "state": state, "reason": reason}
                       for name, state, reason in _implementations(op, device)]
    return {**_row(entry, {entry.name}), "implementations": implementations}


def _implementations(op: Any, device: torch.device) -> list[tuple[str, str, str | None]]:
    """(name, state, reason) of each implementation for small float32 tensors on `device`."""
    args = sample_arguments(op, device)
    if args is None:
        return [(name, "available", "chosen by its arguments") for name in op.names()]
    chosen = op.choose(*args)
    rows = []
    for name in op.names():
        reason = op.why_not(name, *args)
        rows.append(
            (name, "active" if name == chosen else "not available" if reason else "available",
             reason))
    return rows


def sample_arguments(op: Any, device: torch.device) -> list[Any] | None:
    """Small arguments for an operation, by the names of its reference's parameters (see the legend
    of kernels.rows).

    4 tokens, 2 choices, 2 experts of 4 rows each, widths 16. None where an operation has a
    parameter that this table does not know.
    """
    ids_TK = torch.tensor([[0, 1], [1, 0], [0, 1], [1, 0]], device=device)
    source_R = torch.tensor([0, 3, 4, 7, 1, 2, 5, 6], device=device)
    position_TK = torch.empty(8, dtype=torch.int64, device=device).index_copy_(
        0, source_R, torch.arange(8, device=device)).view(4, 2)
    known = {
        "x_TD": torch.ones(4, 16, device=device), "grad_TD": torch.ones(4, 16, device=device),
        "rows_RD": torch.ones(8, 16, device=device), "weights_TK": torch.full(
            (4, 2), 0.5, device=device), "ids_TK": ids_TK, "source_R": source_R,
        "position_TK": position_TK, "top_k": 2, "experts": 2, "scores_TE": torch.rand(
            4, 2, device=device), "k": 2, "logits_TE": torch.rand(4, 2, device=device),
        "mask_T": torch.ones(4, dtype=torch.bool, device=device), "chosen_TK": None,
        "normalize": True, "lse_T": torch.ones(4, device=device), "grad_weights_TK": torch.ones(
            4, 2,
            device=device), "grad_importance_E": torch.ones(2, device=device), "grad_z": torch.ones(
                (), device=device), "ids_N": ids_TK.flatten(), "x": torch.ones(
                    8, 16, device=device), "outer": 2, "inner": 4, "x_RD": torch.ones(
                        8, 16, device=device), "block": 16, "codes_RD": torch.ones(
                            8, 16, device=device).to(torch.float8_e4m3fn), "scales_RB": torch.ones(
                                8, 1,
                                device=device), "dtype": torch.float32, "groups": Groups([4, 4],
                                                                                         device),
        "activation": "gelu", "grad": torch.ones(8, 16, device=device), "h_RF": torch.ones(
            8, 16, device=device), **dict.fromkeys(("w_LIO", "w_LDF", "w_LFD", "into_LIO"),
                                                   torch.ones(2, 16, 16, device=device)),
        **dict.fromkeys(("b_LO", "b_LF", "token_R", "base_RO", "gate_RF", "scale_R", "x_token_R", "grad_token_R")),
    }
    names = list(inspect.signature(op.implementation("torch")).parameters)
    return [known[name] for name in names] if set(names) <= set(known) else None
