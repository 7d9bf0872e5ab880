"""What fairseq 0.12.2 needs to run on today's Python, torch, numpy and hydra, and on a machine
without CUDA.

The only place of this host that patches. Every patch is a function that says version range and
reason. `install` runs once, right after `import fairseq` (see the top-level module
`moe_plugin_fairseq_compat`, which also lets that import succeed on Python >= 3.11). Names are
replaced inside fairseq's own modules; numpy, torch and hydra stay as they are for everybody else.
"""

from __future__ import annotations


def install() -> None:
    """Apply every patch to the imported fairseq 0.12.

    Calling it again, or on another version, does nothing.
    """
    import fairseq

    if getattr(fairseq, "_moe_plugin_compat", False) or not fairseq.__version__.startswith("0.12."):
        return
    fairseq._moe_plugin_compat = True
    from moe_plugin.hosts.fairseq.compat import (
        checkpoints,
        evaluation,
        flags,
        hydra_train,
        launch,
        native,
        patching,
        runtime,
        userdir,
    )
    from moe_plugin.utils.quiet import FAIRSEQ, FAIRSEQ_LINES, hide

    hide(FAIRSEQ, FAIRSEQ_LINES)
    # of two patches in one place, the later one calls the earlier one
    for module in (runtime, launch, userdir, userdir, checkpoints, evaluation, native, flags,
                   hydra_train):
        patching.apply(module)
