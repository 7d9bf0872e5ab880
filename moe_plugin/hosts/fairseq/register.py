"""Entry point of the fairseq integration, which `--user-dir` imports once (see
`moe_plugin.__init__`).

In standard fairseq this module registers models, criteria and the trainer. fairseq's own `moe`
branch already has models and criteria, so there the module replaces the MoE layer and adds this
package's flags to the branch's models.
"""

from __future__ import annotations

from moe_plugin.hosts.fairseq.compat.native import add_flags, native_module, swap_native

_native = native_module()
if _native is not None:
    add_flags()
    swap_native(_native)
else:
    from moe_plugin.hosts.fairseq import registered  # noqa: F401
