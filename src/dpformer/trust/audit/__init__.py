"""The attacks behind `dpformer audit`: single steps, a whole training in one run, the released model; and negative controls."""

from dpformer.trust.audit.setting import Setting, embedded, of_run
from dpformer.trust.audit.suite import Audit, audit

__all__ = ["Audit", "Setting", "audit", "embedded", "of_run"]
