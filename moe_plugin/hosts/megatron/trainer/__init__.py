"""Our training loop around megatron-core: `python -m moe_plugin.hosts.megatron.train`."""
