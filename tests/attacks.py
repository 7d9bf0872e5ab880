"""What ranks send in place of the gradients [L, N] of their files."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moe_plugin.resilience.vote import Ballots

Attack = Callable[[Tensor], Tensor]
ATTACKS: dict[str, Attack] = {
    "reversed": lambda answers: -10 * answers,
    "constant": lambda answers: torch.full_like(answers, 7.0),
    # "a little is enough": as far from the mean as hides in the noise, all attackers alike
    "alie": lambda answers: (answers.mean(0) - 1.5 * answers.std(0)).expand_as(answers),
}


def attack_votes(longer_than: int) -> None:
    """From now on every vote on more numbers than these meets this rank's next attack."""
    winners, turn = Ballots.winners, 0

    def wrong(ballots: Ballots, mine_LN: Tensor) -> Tensor:
        nonlocal turn
        if mine_LN.shape[1] > longer_than:
            turn += 1
            mine_LN = list(ATTACKS.values())[turn % len(ATTACKS)](mine_LN)
        return winners(ballots, mine_LN)

    Ballots.winners = wrong  # type: ignore[method-assign]
