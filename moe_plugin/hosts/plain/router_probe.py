"""Compare a router of `transformers` with the formulas of our routers, for a family that is in no
table. `moe-plugin check-hf` prints the result.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moe_plugin.hosts.plain.kept_router import replaceable
from moe_plugin.routing import score_functions

_SAME = 1e-4  # largest accepted relative difference between weights
# names in `config.json` of the number of groups, and of the number of groups that are chosen
_GROUPS = (("n_group", "num_expert_group"), ("topk_group",))


@dataclass(frozen=True)
class _Match:
    """The agreement of one formula with a router.

    choices: fraction of the tokens with the same experts.
    weights: whether all weights agree, if the choices agree.
    """

    choices: float
    weights: bool
    settings: str


@torch.no_grad()
def probe_router(model: Any, tokens_BT: Tensor) -> str:
    """Return a sentence with the settings that reproduce the first router of a model, or with the
    closest formula and what differs.

    Args:
        model: a model whose experts were not replaced.
        tokens_BT: token ids.
    """
    calls: list[tuple[nn.Module, nn.Module, Any]] = []
    handles = [module.register_forward_pre_hook(
        lambda module, args, parent=parent: calls.append((parent, module, args)))
        for parent in model.modules() for module in parent.children() if replaceable(module)]
    try:
        model(tokens_BT)
    finally:
        for handle in handles:
            handle.remove()
    found = [call for call in calls if len(call[2]) == 3]
    if not found:
        return "its experts are not called with tokens, choices and weights"
    parent, experts, (x_TD, ids_TK, weights_TK) = found[0]
    groups = tuple(next((value for name in names if (value := getattr(
        getattr(experts, "config", model.config), name, None))), 1) for names in _GROUPS)
    matches = list(_matches(parent, experts, (x_TD.float(), ids_TK, weights_TK.float()), groups))
    if not matches:
        return f"{type(parent).__name__} has no matrix with one row per expert"
    best = max(matches, key=lambda match: (match.choices, match.weights))
    if best.choices == 1 and best.weights:
        return f"the router of {type(parent).__name__} is reproduced by {best.settings}"
    differs = (f"{1 - best.choices:.0%} of the tokens choose other experts" if best.choices < 1
               else "the weights differ")
    return (f"no settings reproduce the router of {type(parent).__name__}; the closest are "
            f"{best.settings}, where {differs}")


def _matches(parent: nn.Module, experts: nn.Module, call: tuple[Tensor, Tensor, Tensor],
             groups: tuple[int, ...]) -> Iterator[_Match]:
    x_TD, ids_TK, weights_TK = call
    theirs_TK = ids_TK.sort(1).values
    inside = {id(value) for value in experts.parameters()}
    values = {name: value.detach().float() for name, value
              in (*parent.named_parameters(), *parent.named_buffers()) if id(value) not in inside}
    count = int(ids_TK.max()) + 1
    rows = {name: value for name, value in values.items()
            if value.dim() == 2 and value.shape[0] >= count and value.shape[1] == x_TD.shape[1]}
    for (name, weight_ED), score in itertools.product(rows.items(), score_functions.names()):
        biases = {"": torch.zeros(()), **{
            other: value.flatten() for other, value in values.items()
            if other not in rows and value.numel() == weight_ED.shape[0]}}
        for place, (bias, bias_E) in itertools.product(("logits", "choice"), biases.items()):
            if place == "choice" and not bias:
                continue
            logits_TE = x_TD @ weight_ED.T + (bias_E if place == "logits" else 0.0)
            scores_TE = score_functions.get(score)().scores(logits_TE)
            chosen_TE = scores_TE + (bias_E if place == "choice" else 0.0)
            for best in (0, 1, 2) if groups[0] > 1 else (0,):
                mine_TK = _limited(chosen_TE, groups, best).topk(ids_TK.shape[1]).indices
                same = float((mine_TK.sort(1).values == theirs_TK).all(1).float().mean())
                settings = f"score={score}" + (f", {place} plus {bias}" if bias else "") + (
                    f", group_scores={best}" if best else "")
                yield from _weighed(same, f"{settings} ({name})", scores_TE.gather(1, ids_TK),
                                    weights_TK)


def _limited(chosen_TE: Tensor, groups: tuple[int, ...], best: int) -> Tensor:
    """Exclude the experts outside of the best groups. A group's score is the sum of its `best` best
    scores.
    """
    count, most = groups
    if not best or chosen_TE.shape[1] % count or chosen_TE.shape[1] // count < best:
        return chosen_TE
    chosen_TGE = chosen_TE.unflatten(1, (count, -1))
    kept_TG = chosen_TGE.topk(best).values.sum(-1).topk(most).indices
    outside_TG = torch.ones_like(chosen_TGE[..., 0]).scatter(1, kept_TG, 0.0).bool()
    return chosen_TGE.masked_fill(outside_TG[..., None], float("-inf")).flatten(1)


def _weighed(same: float, settings: str, chosen_TK: Tensor, weights_TK: Tensor
             ) -> Iterator[_Match]:
    for normalize, mine_TK in (("none", chosen_TK),
                               ("before_drop", chosen_TK / chosen_TK.sum(1, keepdim=True))):
        ratio_TK = weights_TK / mine_TK
        scale = float(ratio_TK.median())
        fits = bool(((ratio_TK - scale).abs() <= _SAME * abs(scale)).all())
        yield _Match(same, fits, f"{settings}, normalize={normalize}, scaling={scale:.4g}")
