"""Models that are larger than the device: weights stream to it block by block."""
