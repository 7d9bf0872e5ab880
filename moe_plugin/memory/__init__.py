"""Storage of experts, activations and weights outside of the device.

`copier.Copier` runs all background copies between a device and a slower tier. A `tiers.Tier` stores
tensors that are not on the device.
"""
