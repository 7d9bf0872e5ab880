"""Benchmarks of the layer, its peers and the kernels, with bounds of the same run."""
