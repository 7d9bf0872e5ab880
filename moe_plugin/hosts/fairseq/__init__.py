"""moe-plugin inside fairseq: models, criteria, gradient scale, checkpoints. `register` puts
them in fairseq's registries.
"""
