"""Patches for fairseq 0.12.2. With these patches, fairseq runs on current versions of Python,
torch, numpy and hydra.

The patches also let fairseq run without CUDA. This package contains all patches for fairseq. The
docstring of each patch function states which versions of fairseq need the patch, and why. The
patches replace names only in the modules of fairseq. Other code still sees the original numpy,
torch and hydra.

Call `install` once, directly after `import fairseq`. The top-level module
`moe_plugin_fairseq_compat` calls `install`. This top-level module also makes `import fairseq`
succeed on Python >= 3.11.
"""

from __future__ import annotations


def install() -> None:
    """Apply all patches to fairseq 0.12, which must already be imported.

    This function does nothing if it was called before, or if fairseq is not version 0.12.
    """
    import fairseq

    if getattr(fairseq, "_moe_plugin_compat", False) or not fairseq.__version__.startswith("0.12."):
        return
    fairseq._moe_plugin_compat = True
    from moe_plugin.hosts.fairseq.compat import (
        checkpoints,
        evaluation,
        flags,
        launch,
        native,
        patching,
        runtime,
        userdir,
    )
    from moe_plugin.utils.quiet import FAIRSEQ, FAIRSEQ_LINES, hide

    hide(FAIRSEQ, FAIRSEQ_LINES)
    # if two patches replace the same name, the later patch calls the earlier one
    for module in (runtime, launch, userdir, checkpoints, evaluation, native, flags):
        patching.apply(module)
