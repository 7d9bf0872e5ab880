"""What does not lie on the device: experts, activations, weights, and the tiers below them.

`copier.Copier` alone copies between a device and a slower tier in the background; `tiers.Tier` is
where things lie when they are not on the device.
"""
