"""`--spec tests.hosts.megatron.native_hybrid stack`: a hybrid model with Megatron's own layers."""

from moe_plugin.hosts.megatron.compat import hybrid
from moe_plugin.hosts.megatron.compat.settings import script_arguments, script_config

stack = hybrid.stack_spec(script_config(), script_arguments()["hybrid_layer_pattern"], False)
