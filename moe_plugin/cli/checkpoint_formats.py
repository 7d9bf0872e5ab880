"""All formats of checkpoints: importing this registers them. Their modules import no framework."""

from moe_plugin.checkpoint import huggingface as _huggingface  # noqa: F401 - registers
from moe_plugin.checkpoint import plain as _plain  # noqa: F401 - registers
from moe_plugin.checkpoint import tutel as _tutel  # noqa: F401 - registers
from moe_plugin.checkpoint.formats import formats
from moe_plugin.hosts.fairseq import branch_format as _branch  # noqa: F401 - registers
from moe_plugin.hosts.fairseq import checkpoint_format as _fairseq  # noqa: F401 - registers
from moe_plugin.hosts.megatron.offline import formats as _megatron  # noqa: F401 - registers

__all__ = ["formats"]
