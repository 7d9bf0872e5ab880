"""Everything that depends on Megatron's version, and all patches of Megatron.

`names`: classes and functions that may move. `core`: layer, groups, specs, losses.
`optimizer`: optimizer state in checkpoints. `settings`: settings and script arguments, and renamed
settings. `fields`: the treatment of each MoE setting. `sequence_parts`: attention and norms without
Transformer Engine. `finite`: skipped steps. `cpu`: Megatron-core without CUDA. `script_cpu`:
Megatron's training code without CUDA. `writers`: checkpoint writers that end with their rank.
"""
