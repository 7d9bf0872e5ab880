"""Integration with Megatron-core: module specs, the layer adapter, a training script and a
launcher.

Import the modules you need, for example `spec.swap_moe`, `layer.PluginMoELayer`, `train`,
`launch` or `cpu`. Importing this package does not import Megatron.
"""
