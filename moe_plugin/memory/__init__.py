"""Storage of experts, activations and weights in host memory or on disk.

`copier.Copier` runs all background copies between a device and a slower memory tier. A `tiers.Tier`
stores the tensors that are not on the device.
"""
