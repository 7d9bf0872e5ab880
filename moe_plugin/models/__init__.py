"""fairseq's door: `--user-dir .../moe_plugin` makes fairseq import every module here, and nothing
else does.
"""
