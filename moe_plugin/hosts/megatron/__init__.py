"""Megatron-core host: module specs, the layer's adapter, a training script and a launcher.

Import what you need: `spec.swap_moe`, `layer.PluginMoELayer`, `train`, `launch`, `cpu`. Importing
this package does not import Megatron.
"""
