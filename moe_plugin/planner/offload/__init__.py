"""Plan the offloading of activations and weights from device memory to slower memory. Never imports
torch.
"""
