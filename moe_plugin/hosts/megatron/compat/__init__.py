"""Everything that depends on Megatron's version, and every patch of it.

`core`: layer, groups, specs, losses. `optimizer`: its state in checkpoints. `settings`: its
settings and script. `norm`: norms without Apex. `cpu`: running without CUDA.
"""
