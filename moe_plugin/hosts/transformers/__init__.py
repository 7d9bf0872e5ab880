"""Implementations of experts and expert parallelism that Hugging Face's `transformers` finds by
name.

    import moe_plugin.hosts.transformers
    model = AutoModelForCausalLM.from_pretrained(path, experts_implementation="moe_plugin")

To distribute the experts over ranks, pass `distributed_config=DistributedConfig(ep_size=2,
ep_implementation="moe_plugin")`. No module of the model is replaced. Parameters, files, adapters
and generation work in the same way as without this package. `Trainer` also saves and resumes if
experts are distributed, and weights the model's auxiliary loss correctly on several ranks. See
`compat.trainer`.
"""

import transformers

from moe_plugin.hosts.transformers.register import NAME, check, use

use({}, NAME)
if transformers.utils.is_accelerate_available():  # without it, `transformers` has no `Trainer`
    from moe_plugin.hosts.transformers.compat.trainer import extend_trainer

    extend_trainer()

__all__ = ["NAME", "check", "use"]
