"""What ranks send in place of the gradients [L, N] of their files."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moe_plugin.training.resilience.vote import Ballots

Attack = Callable[[Tensor], Tensor]
ATTACKS: dict[str, Attack] = {
    "reversed": lambda answers: -10 * answers,
    "constant": lambda answers: torch.full_like(answers, 7.0),
    # "a little is enough": as far from the mean as hides in the noise, all attackers alike
    "alie": lambda answers: (answers.mean(0) - 1.5 * answers.std(0)).expand_as(answers),
}


def attack_votes() -> None:
    """From now on every vote on gradients meets this rank's next attack, and so does their sum over
    the ranks of its worker.
    """
    result, turn = Ballots.result, 0

    def wrong(ballots: Ballots, mine_LN: Tensor, shared: int = 0) -> Tensor:
        nonlocal turn
        turn += 1
        return result(ballots, list(ATTACKS.values())[turn % len(ATTACKS)](mine_LN), shared)

    Ballots.result = wrong  # type: ignore[method-assign]
