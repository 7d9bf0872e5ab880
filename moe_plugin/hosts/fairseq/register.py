"""Entry point of the fairseq integration. `--user-dir` imports this module once (see
`moe_plugin.__init__`).

In standard fairseq, the import registers models, criteria and the trainer. fairseq's own `moe`
branch already has models and criteria. In fairseq's `moe` branch, the import replaces the MoE
layer, and adds this package's flags to the models of the branch.
"""

from __future__ import annotations

from moe_plugin.hosts.fairseq.compat.native import add_flags, native_module, swap_native

_native = native_module()
if _native is not None:
    add_flags()
    swap_native(_native)
else:
    from moe_plugin.hosts.fairseq import registered  # noqa: F401
