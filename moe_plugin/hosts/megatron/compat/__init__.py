"""Everything that depends on Megatron's version, and every patch of it.

`names`: classes and functions whose place may change. `core`: layer, groups, specs, losses.
`optimizer`: its state in checkpoints. `settings`: its settings and script, and what was renamed.
`fields`: what becomes of each MoE setting. `norm`: norms without Apex. `finite`: steps that are
skipped. `cpu`: running without CUDA; `script_cpu`: its training code, too. `writers`: processes
that write checkpoints end with their rank.
"""
