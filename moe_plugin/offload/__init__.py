"""What does not lie on the device: tiers, copies in the background, experts, activations, weights.

`copier.Copier` is the only thing that copies between a device and a slower tier; `tiers.Tier` is
where things lie when they are not on the device. `store.ExpertStore` keeps experts there.
"""
