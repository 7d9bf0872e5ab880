"""Patches that make fairseq 0.12.2 run on current versions of Python, torch, numpy and hydra.

With the patches, fairseq also runs without CUDA. All patches for fairseq are in this package. Each
patch is a function, whose docstring contains the range of fairseq versions and the reason. The
patches replace names only inside fairseq's own modules. For all other code, numpy, torch and hydra
are unchanged.

`install` is called once, right after `import fairseq`. The top-level module
`moe_plugin_fairseq_compat` calls `install`, and also makes `import fairseq` succeed on Python >=
3.11.
"""

from __future__ import annotations


def install() -> None:
    """Apply every patch to the imported fairseq 0.12.

    The function does nothing if it has already been called, or if the version of fairseq is not
    0.12.
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
    # if two patches replace the same name, the later patch calls the earlier one
    for module in (runtime, launch, userdir, userdir, checkpoints, evaluation, native, flags,
                   hydra_train):
        patching.apply(module)
