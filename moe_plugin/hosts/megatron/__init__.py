"""Integration with Megatron-core: module specs, layer adapter, training script and launcher.

Import the modules you need, for example `spec.swap_moe`, `layer.PluginMoELayer`, `train`,
`launch` or `cpu`. Importing this package does not import Megatron.
"""
