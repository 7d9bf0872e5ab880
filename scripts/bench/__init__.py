"""Benchmarks of the MoE layer, the layers of other frameworks, and the kernels. The lower bounds
used for comparison are measured in the same run.
"""
