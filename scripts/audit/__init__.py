"""Check whether an expert-parallel training step of any framework is correct.

The audit compares the loss, the gradients and the gradient norm with a dense reference.
"""

from scripts.audit.contract import AuditTarget, Batch, HeldPart, load
from scripts.audit.run import Audit, audit

__all__ = ["Audit", "AuditTarget", "Batch", "HeldPart", "audit", "load"]
