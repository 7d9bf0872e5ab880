"""Our experts and our exchange under the names that Hugging Face's `transformers` asks for.

    import moe_plugin.hosts.transformers
    model = AutoModelForCausalLM.from_pretrained(path, experts_implementation="moe_plugin")

or, spread over ranks, `distributed_config=DistributedConfig(ep_size=2,
ep_implementation="moe_plugin")`. No module is swapped: the model's parameters, files, `Trainer`,
adapters and generation stay `transformers`'.
"""

from moe_plugin.hosts.transformers.register import NAME, check, use

use({}, NAME)

__all__ = ["NAME", "check", "use"]
