"""Storage of experts, activations and weights in host memory or on disk.

All background copies between a device and a slower tier are executed by `copier.Copier`. Tensors
that are not on the device are stored in a `tiers.Tier`.
"""
