"""The hash router. A fixed table assigns an expert to each token id."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_plugin.config import MoEConfig, with_overrides
from moe_plugin.config.router import HashConfig
from moe_plugin.routing.call import RoutingCall, check_integers, check_range
from moe_plugin.routing.registry import routers
from moe_plugin.routing.routers.base import Router
from moe_plugin.utils.messages import short
from moe_plugin.utils.regular_files import check_input


@routers.register("hash")
class HashRouter(Router):
    """A router that assigns a fixed expert with weight 1 to each token id of the vocabulary. Each
    call requires token ids.

    The table (`table_V`, int64) is filled randomly, balanced by token frequency, or read from a
    file (`router.hash`). The table is saved with the weights. Losses use a probability of 1 for
    each chosen expert. Losses of this router therefore measure the balance but have no gradient.
    Source: Hash layers (Roller et al., 2021).
    """

    reads = frozenset({"hash"})
    fixed_k = 1
    balances = True
    own_losses = frozenset()
    score_name = "softmax"
    adds_noise = False
    needs = frozenset({"token_ids"})
    table_V: Tensor

    def build(self, dtype: torch.dtype | None, device: Any) -> None:
        """Create the table and register it as a buffer. The router has no trainable parameters."""
        self.register_buffer("table_V",
                             make_table(self.config.hash, self.num_experts).to(device))

    def scores(self, x_TD: Tensor, call: RoutingCall) -> Tensor:
        """Return zeros, because the experts depend only on the token ids; see `Router.scores`."""
        assert call.info.token_ids_T is not None
        check_integers("token_ids_T", call.info.token_ids_T, x_TD.shape[0])
        return x_TD.new_zeros(x_TD.shape[0], self.num_experts,
                              dtype=torch.promote_types(x_TD.dtype, torch.float32))

    def select(self, call: RoutingCall) -> Tensor:
        """Look up the experts in the table; see `Router.select`.

        The choices are recorded, because a host framework may pass the ids of other tokens before
        the recomputation.
        """
        assert call.info.token_ids_T is not None
        # Padding may carry any id, also one outside the vocabulary.
        last, ids_T = self.table_V.numel() - 1, torch.where(call.real_T, call.info.token_ids_T, 0)
        check_range(ids_T, 0, last, f"The token ids are in {{}}..{{}}, but must be in 0..{last}. "
                    "Set router.hash.vocabulary to the size of the vocabulary.")
        return self.table_V[ids_T.long()][:, None]  # torch would treat uint8 ids as a mask

    def weigh(self, call: RoutingCall, ids_TK: Tensor) -> Tensor:
        """Return weights of 1; see `Router.weigh`."""
        call.scores_TE = F.one_hot(ids_TK[:, 0], self.num_experts).to(call.logits_TE.dtype)
        return torch.ones_like(ids_TK, dtype=call.logits_TE.dtype)


def with_vocabulary(config: MoEConfig, sizes: Sequence[int], whose: str) -> MoEConfig:
    """Set `router.hash.vocabulary` if the host framework knows the size of the vocabulary and the
    user has not set it.

    Args:
        sizes: valid vocabulary sizes, for example without and with padding rows.
            `router.hash.vocabulary` is set to the first of the sizes. If the size is unknown,
            `sizes` is empty.
        whose: name of the vocabulary, for use in error messages.
    Raises:
        ValueError: If the user has set a different size.
    """
    given = config.router.hash.vocabulary
    if "hash" not in config.router.names or not sizes or given in sizes:
        return config
    if given:
        raise ValueError(f"router.hash.vocabulary={given} contradicts {whose} of {sizes[0]} tokens."
                         f" Use {' or '.join(map(str, dict.fromkeys(sizes)))}, or remove the "
                         "setting.")
    return with_overrides(config, {"router.hash.vocabulary": sizes[0]})


def make_table(config: HashConfig, experts: int) -> Tensor:
    """Create the table for the `router.hash` settings, int64 [V].

    Raises:
        ValueError: If the settings are inconsistent, or if a file contains nonexistent experts or
            negative frequencies.
    """
    listed_V = None if config.path is None else _read(config.path)
    vocabulary = config.vocabulary or (0 if listed_V is None else listed_V.numel())
    if vocabulary < 1 or (listed_V is not None and listed_V.numel() != vocabulary):
        entries = "" if listed_V is None else (
            f" and of {short(config.path)} with {listed_V.numel()} entries")
        raise ValueError(f"router.hash.vocabulary={config.vocabulary} is not valid. Set it to the "
                         f"size of the vocabulary{entries}.")
    # Drawn on the CPU, so that the table does not depend on the device.
    g = torch.Generator().manual_seed(config.seed)
    if config.kind == "random":
        return torch.randint(experts, (vocabulary,), generator=g, device="cpu")
    if config.kind == "balanced":
        even_V = torch.ones(vocabulary, dtype=torch.int64, device="cpu")
        if listed_V is not None and int(listed_V.min()) < 0:
            raise ValueError(
                f"router.hash.path={short(config.path)} contains the frequency "
                f"{int(listed_V.min())}, but frequencies must be >= 0 with "
                "router.hash.kind=balanced. Count the tokens again, or set kind=file for a table.")
        return balanced_table(even_V if listed_V is None else listed_V, experts, g)
    assert listed_V is not None
    if not 0 <= int(listed_V.min()) <= int(listed_V.max()) < experts:
        raise ValueError(
            f"The table {short(config.path)} contains experts {int(listed_V.min())}.."
            f"{int(listed_V.max())}, but experts must be in 0..{experts - 1}. Create the table for "
            "this number of experts.")
    return listed_V


def balanced_table(counts_V: Tensor, experts: int,
                   generator: torch.Generator | None = None) -> Tensor:
    """Assign each token to the expert with the smallest load so far, and return the table, int64
    [V].

    Tokens are assigned in order of decreasing frequency. Among experts with equal loads, the expert
    with the fewest tokens is used, and among these the expert with the lowest index. If all
    frequencies are equal, every expert is assigned floor(V / E) or ceil(V / E) tokens. Tokens with
    equal frequencies are in random order.

    Args:
        counts_V: int64 [V], the number of occurrences of each token, which must be at least 0.
        experts: number of experts, E.
        generator: random generator that determines the order of tokens with equal frequencies.
    """
    shuffled_V = torch.randperm(counts_V.numel(), generator=generator, device="cpu")
    order = shuffled_V[torch.argsort(counts_V[shuffled_V], descending=True, stable=True)].tolist()
    counts, table_V = counts_V.tolist(), torch.empty_like(counts_V)
    heap = [(0, 0, e) for e in range(experts)]
    for token in order:
        load, number, e = heapq.heappop(heap)
        table_V[token] = e
        heapq.heappush(heap, (load + counts[token], number + 1, e))
    return table_V


def _read(path: str) -> Tensor:
    remedy = "use a text file with one integer per token id"
    check_input(path, "router.hash.path", remedy)
    try:
        return torch.tensor([int(word) for word in Path(path).read_text(encoding="utf-8").split()],
                            dtype=torch.int64)
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: more than 64 bits
        raise ValueError(f"router.hash.path={short(path)} cannot be read: {short(error)}; "
                         f"{remedy}") from error
