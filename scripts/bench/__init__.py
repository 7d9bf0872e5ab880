"""Benchmarks of the MoE layer, the layers of other frameworks, and the kernels. The lower bounds to
which times are compared are measured in the same run.
"""
