"""Several routers in one layer, one of which decides a call."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from moe_plugin.comm.base import Comm
from moe_plugin.records import Routing, TokenInfo


class Gates(nn.Module):
    """Routers of which `TokenInfo.gate_index` names the one that decides a call; the first where nothing is said.

    What a host sets (`replay`, `loss_comm`, `batch_comm`) goes to all of them.
    """

    def __init__(self, routers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.gates = nn.ModuleList(routers)

    @property
    def needs(self) -> frozenset[str]:
        """What any of them wants to know of a call."""
        return frozenset().union(*(getattr(gate, "needs", frozenset()) for gate in self.gates))

    def forward(self, x_TD: Tensor, mask_T: Tensor | None = None, top_k: int | None = None, info: TokenInfo | None = None) -> Routing:
        """As the chosen router. `ValueError`: there is no router of that index."""
        index = info.gate_index if info is not None else 0
        if not 0 <= index < len(self.gates):
            raise ValueError(f"gate_index={index} is out of bounds: must be in 0..{len(self.gates) - 1}; router.name lists {len(self.gates)}")
        return self.gates[index](x_TD, mask_T, top_k, info)

    def _tell(self, name: str, value: object) -> None:
        for gate in self.gates:
            setattr(gate, name, value)

    @property
    def replay(self) -> bool:
        """See `moe_plugin.parallel.recompute`."""
        return any(getattr(gate, "replay", False) for gate in self.gates)

    @replay.setter
    def replay(self, value: bool) -> None:
        self._tell("replay", value)

    @property
    def loss_comm(self) -> Comm | None:
        """See `Router.loss_comm`."""
        return getattr(self.gates[0], "loss_comm", None)

    @loss_comm.setter
    def loss_comm(self, value: Comm | None) -> None:
        self._tell("loss_comm", value)

    @property
    def batch_comm(self) -> Comm | None:
        """See `Router.batch_comm`."""
        return getattr(self.gates[0], "batch_comm", None)

    @batch_comm.setter
    def batch_comm(self, value: Comm | None) -> None:
        self._tell("batch_comm", value)
