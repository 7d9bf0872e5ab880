"""All code that depends on the version of Megatron, and all code that patches Megatron.

`names`: Megatron symbols whose import path may differ between versions. `core`: interfaces to
Megatron's MoE layers, process groups and specs. `optimizer`: optimizer state in checkpoints.
`settings`: settings and script arguments, including renamed settings. `fields`: table of Megatron's
MoE settings that states how each setting is handled. `sequence_parts`: attention and norms that do
not need Transformer Engine. `finite`: skipped steps. `cpu`: patches that make Megatron-core run
without CUDA. `script_cpu`: patches that make Megatron's training code run without CUDA.
`checkpointing`: changes to Megatron's checkpoints and to the processes that write them.
"""
