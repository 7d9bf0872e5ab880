"""Implementations of experts and expert parallelism that Hugging Face's `transformers` finds by
name.

    import moe_plugin.hosts.transformers
    model = AutoModelForCausalLM.from_pretrained(path, experts_implementation="moe_plugin")

To distribute the experts over ranks, pass `distributed_config=DistributedConfig(ep_size=2,
ep_implementation="moe_plugin")`. No module of the model is replaced. Parameters, files, `Trainer`,
adapters and generation work in the same way as without this package.
"""

from moe_plugin.hosts.transformers.register import NAME, check, use

use({}, NAME)

__all__ = ["NAME", "check", "use"]
