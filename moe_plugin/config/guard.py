"""Settings against ranks that compute or send wrong numbers."""

from __future__ import annotations

from dataclasses import dataclass

from moe_plugin.config.options import MOST_RANKS, SettingsSection, option

ASSIGNMENTS = ("cyclic", "mols", "ramanujan", "repetition")
AGGREGATES = ("mean", "median")
MOST_STEPS = 10**9  # beyond any use


@dataclass(kw_only=True)
class GuardConfig(SettingsSection):
    """Checks between ranks, which hosts run; see docs/wrong_ranks.md."""

    PATH = "guard."

    twins: int = option(
        0,
        "> 0: every so many steps ranks that store the same experts compute one micro-batch alike, "
        "and one that gets other bits is named; 0: never",
        flag="check-twins")
    votes: int = option(
        0,
        "data-parallel ranks that compute each part of a batch; the gradient of most of them "
        "counts. Odd; each rank computes so many times as much; 0: no votes",
        flag="votes")
    assignment: str = option(
        "cyclic",
        "with votes: which ranks compute which parts (ByzShield). cyclic: any number of ranks; "
        "mols, ramanujan, repetition: for 15, 25, 35, ... ranks",
        choices=ASSIGNMENTS, flag="vote-assignment")
    aggregate: str = option(
        "mean",
        "with votes: what is done with the parts' gradients. mean: a run's own numbers; median: of "
        "each coordinate, which a few parts with wrong majorities do not move far",
        choices=AGGREGATES, flag="vote-aggregate")

    def check_bounds(self) -> None:
        """Check steps and ranks."""
        self.within("twins", 0, MOST_STEPS, "use 0 for none, or 1000")
        self.within("votes", 0, MOST_RANKS, "use 0 for none, or 3")
        self.require("votes", self.votes == 0 or (self.votes >= 3 and self.votes % 2 == 1),
                     "0, or odd and >= 3", "an even number of answers has no majority: use 3")
        self.read_where(self.votes > 0, "where guard.votes=0", "use guard.votes=3", "assignment",
                        "aggregate")
