"""Registration of all checkpoint formats. Importing this module registers all formats. The modules
of the formats do not import any framework.
"""

from moe_plugin.checkpoint.formats import plain as _plain  # noqa: F401 - registers
from moe_plugin.checkpoint.formats import tutel as _tutel  # noqa: F401 - registers
from moe_plugin.checkpoint.formats.base import formats
from moe_plugin.checkpoint.formats.fairseq import branch as _branch  # noqa: F401 - registers
from moe_plugin.checkpoint.formats.fairseq import format as _fairseq  # noqa: F401 - registers
from moe_plugin.checkpoint.formats.huggingface import format as _hf  # noqa: F401 - registers
from moe_plugin.checkpoint.formats.megatron import format as _megatron  # noqa: F401 - registers

__all__ = ["formats"]
