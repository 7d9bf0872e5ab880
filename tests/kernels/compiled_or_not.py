"""Whether experts on CPU and their router compute with compiled functions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from moe_plugin.kernels import rows, scores
from moe_plugin.kernels.cpu import expert_ffn as fused
from moe_plugin.kernels.cpu import products


@contextmanager
def compiled(yes: bool) -> Iterator[None]:
    """No: torch's operations, as on a machine without a compiler. Yes: as this machine does."""
    with pytest.MonkeyPatch.context() as patch:
        if not yes:
            patch.setattr(fused, "passes", lambda x, activation: None)
            patch.setattr(products, "side_by_side", lambda: None)
            patch.setattr(scores, "scores_of", lambda x_TD, weight_ED: None)
            patch.setattr(rows, "sum_of_rows", lambda rows_RD, position_TK: None)
        yield
