"""Which replicas live, as torchft's lighthouse says it; the lighthouse may be started again."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

# torchft's count of steps: replicas that made one together, and those that start, by their progress
LIVING = 1 << 60
IN_A_QUORUM = 1 << 32  # steps between two changes of who lives
_EVERY_S = 0.1  # a lighthouse that does not answer is asked again


def retries(wait_s: float) -> int:
    """How often torchft asks a lighthouse that is away for so long, beyond the first time."""
    return max(0, round(wait_s / _EVERY_S) - 1)


class Quorums:
    """In the place of the client by which torchft asks who lives: numbers quorums.

    A lighthouse counts its quorums from 1 on, again where it was started again. torchft takes a
    number that did not change for a quorum that did not, and finds the other replicas under it in
    a store, where those of an earlier quorum left theirs. Numbers from here do not come again; the
    members of a quorum all compute the same.

    Args:
        client: torchft's.

    Attributes:
        least_count: of a step that the present quorum makes: more than what any replica counted in
            an earlier one.
    """

    def __init__(self, client: Any) -> None:
        self._client, self._met, self._number, self.least_count = client, (), -1, 0

    def _quorum(self, **asked: Any) -> Any:
        found = self._client._quorum(**asked)
        met = (found.quorum_id, *sorted(found.replica_ids))
        # to heal in the quorum that this replica was in: it is one of a new lighthouse, of which
        # the others have been in another one meanwhile
        if met != self._met or found.heal:
            self._met = met
            place = blake2b(repr((met, found.max_step)).encode(), digest_size=7).digest()
            self._number = int.from_bytes(place, "big")
            before = (max(found.max_step, LIVING) - LIVING) // IN_A_QUORUM
            self.least_count = LIVING + max(before + 1, found.quorum_id) * IN_A_QUORUM
        found.quorum_id = self._number
        return found

    def should_commit(self, *args: Any, **kwargs: Any) -> bool:
        """See torchft."""
        return self._client.should_commit(*args, **kwargs)
