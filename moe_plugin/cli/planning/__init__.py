"""Functions that plan the training of models on clusters, and explain the resulting plans. This
subpackage does not import torch.
"""
