"""MoE layers of this package as implementations that Hugging Face's `transformers` finds by name.

    import moe_plugin.hosts.transformers
    model = AutoModelForCausalLM.from_pretrained(path, experts_implementation="moe_plugin")

To distribute the experts over ranks, pass
`distributed_config=DistributedConfig(ep_size=2, ep_implementation="moe_plugin")`. No module is
replaced. The model's parameters, files, `Trainer`, adapters and generation are still those of
`transformers`.
"""

from moe_plugin.hosts.transformers.register import NAME, check, use

use({}, NAME)

__all__ = ["NAME", "check", "use"]
