"""moe-plugin inside fairseq 0.12.2: models, criteria, gradient scale, checkpoints. `register` puts
them in fairseq's registries.
"""
