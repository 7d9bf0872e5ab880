"""Functions that plan the training of models on clusters and explain the plans. This package does
not import torch.
"""
