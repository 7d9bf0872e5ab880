"""All code that depends on the version of Megatron, and all patches of Megatron.

`names`: names of classes and functions whose module may change between versions. `core`: MoE
layers, process groups, specs and losses. `optimizer`: optimizer state in checkpoints. `settings`:
settings and script arguments, including renamed settings. `fields`: table of Megatron's MoE
settings, with the way in which each one is handled. `sequence_parts`: attention and norms without
Transformer Engine. `finite`: skipped steps. `cpu`: Megatron-core without CUDA. `script_cpu`:
Megatron's training code without CUDA. `writers`: checkpoint writer processes that terminate
together with their rank.
"""
