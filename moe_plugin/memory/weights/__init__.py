"""Training of models whose weights do not fit in device memory. Weights are streamed to the device
block by block.
"""
