"""What fairseq 0.12.2 needs to run on today's Python, torch, numpy and hydra, and on a machine
without CUDA.

The only place of this host that patches. Every shim is a function that says version range and
reason. `install` runs once, right after `import fairseq` (see the top-level module
`moe_plugin_fairseq_compat`, which also lets that import succeed on Python >= 3.11). Names are
replaced inside fairseq's own modules; numpy, torch and hydra stay as they are for everybody else.
"""

from __future__ import annotations


def install() -> None:
    """Apply every shim to the imported fairseq 0.12.

    Calling it again, or on another version, does nothing.
    """
    import fairseq

    if getattr(fairseq, "_moe_plugin_compat", False) or not fairseq.__version__.startswith("0.12."):
        return
    fairseq._moe_plugin_compat = True
    from moe_plugin.hosts.fairseq.compat import (
        checkpoints,
        evaluation,
        fields,
        flags,
        hydra_train,
        launch,
        optimizers,
        parsing,
        runtime,
        saving,
        userdir,
    )
    from moe_plugin.quiet import FAIRSEQ, FAIRSEQ_LINES, hide

    hide(FAIRSEQ, FAIRSEQ_LINES)
    for shims in (runtime.SHIMS, launch.SHIMS, userdir.SHIMS, saving.SHIMS, checkpoints.SHIMS,
                  evaluation.SHIMS, flags.SHIMS, optimizers.SHIMS,
                  fields.SHIMS, parsing.SHIMS, hydra_train.SHIMS):
        for shim in shims:
            shim()
