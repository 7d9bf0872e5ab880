"""`fairseq-train` with a NaN in the gradient of one expert on the last rank:
`nan_train.py STEP ARGUMENTS...`.
"""

from __future__ import annotations

import os
import sys

from fairseq_cli.train import cli_main
from torch import Tensor

from moe_plugin.hosts.fairseq import layers


def poison(step: int) -> None:
    """Every `FairseqMoELayer` built from now on has a NaN in one expert's gradient at its `step`-th
    backward pass (from 1).
    """
    original = layers.FairseqMoELayer.__init__

    def init(self: layers.FairseqMoELayer, settings: layers.LayerSettings) -> None:
        original(self, settings)
        passes = 0

        def spoil(gradient: Tensor) -> Tensor:
            nonlocal passes
            passes += 1
            if passes == step:
                gradient = gradient.clone()
                gradient.view(-1)[0] = float("nan")
            return gradient

        self.moe.experts.w_in_LDF.register_hook(spoil)

    layers.FairseqMoELayer.__init__ = init  # type: ignore[method-assign]


if __name__ == "__main__":
    if os.environ.get("RANK", "0") == str(int(os.environ.get("WORLD_SIZE", "1")) - 1):
        poison(int(sys.argv.pop(1)))
    else:
        sys.argv.pop(1)
    cli_main()
