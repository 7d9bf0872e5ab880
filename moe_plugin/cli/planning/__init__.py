"""Functions that plan models on clusters and format explanations of the plans. This package does
not import torch.
"""
