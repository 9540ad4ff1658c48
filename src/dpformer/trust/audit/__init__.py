"""The attacks behind `dpformer audit`: on a folder's answers, on its published model, on its floating-point numbers."""

from dpformer.trust.audit.game import Setting, of_preset, of_run
from dpformer.trust.audit.suite import Audit, audit

__all__ = ["Audit", "Setting", "audit", "of_preset", "of_run"]
