"""The short script of the package, by this path, too: moe_plugin/hosts/megatron/examples."""
from moe_plugin.hosts.megatron.examples.pretrain_gpt_moe import main

if __name__ == "__main__":
    main()
