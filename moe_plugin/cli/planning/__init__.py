"""Planning of models on clusters, and the texts that explain the plans. Does not import torch."""
