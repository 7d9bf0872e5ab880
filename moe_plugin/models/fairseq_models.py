"""Registers the models, criteria and trainer of the fairseq host (imported by fairseq's
`--user-dir`).
"""

from moe_plugin.hosts.fairseq import register  # noqa: F401
