"""An ensemble of heads on one trunk."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_plugin.ensembles.cmcl import share_features


class EnsembleHeads(nn.Module):
    """M heads, each a hidden layer (gelu), shared features and a linear map to C classes.

    Args:
        dim: width of the trunk.
        classes: C.
        heads: M.
        hidden: width of a head's hidden layer; 0: only the linear map.
        sharing: probability that a feature of one head is added to another's (`share_features`); 0:
            none. Needs a hidden layer.
        dtype, device: of the parameters.
    Raises:
        ValueError: no head; sharing without a hidden layer.
    """

    def __init__(self, dim: int, classes: int, heads: int, *, hidden: int = 0, sharing: float = 0.0,
                 dtype: torch.dtype | None = None, device: Any = None) -> None:
        super().__init__()
        if heads < 1:
            raise ValueError(f"heads={heads} is out of bounds: must be >= 1; use e.g. 5")
        if sharing and not hidden:
            raise ValueError(f"sharing={sharing} has nothing to share: must be 0 without a hidden "
                             "layer; set hidden")
        where = {"dtype": dtype, "device": device}
        self.sharing = sharing
        hidden_MDH = torch.empty(heads, dim, hidden, **where) if hidden else None
        self.w_hidden_MDH = None if hidden_MDH is None else nn.Parameter(hidden_MDH)
        self.w_out_MHC = nn.Parameter(torch.empty(heads, hidden or dim, classes, **where))
        for parameter in self.parameters():
            for head in parameter:
                nn.init.xavier_uniform_(head)

    def forward(self, x: Tensor, own: bool = False) -> Tensor:
        """Logits [..., M, C], float.

        Args:
            x: [..., D], of the trunk. own: x is [..., M, D], features of each head's own.
        """
        inputs = "...md" if own else "...d"
        if self.w_hidden_MDH is None:
            return torch.einsum(f"{inputs},mdc->...mc", x, self.w_out_MHC)
        h_MH = F.gelu(torch.einsum(f"{inputs},mdh->...mh", x, self.w_hidden_MDH))
        return torch.einsum("...mh,mhc->...mc", share_features(h_MH, self.sharing, self.training),
                            self.w_out_MHC)
