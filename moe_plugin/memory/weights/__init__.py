"""Training of models that are larger than the device, by streaming weights block by block."""
