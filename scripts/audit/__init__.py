"""Is an expert-parallel training step right? Its loss, gradients and norm against a dense
reference, whatever framework it is written in.
"""

from scripts.audit.contract import AuditTarget, Batch, HeldPart, load
from scripts.audit.run import Audit, audit

__all__ = ["Audit", "AuditTarget", "Batch", "HeldPart", "audit", "load"]
