"""The attacks behind `dpformer audit`: single steps, a whole training in one run, the released model; and negative controls."""

from dpformer.trust.audit.everything import Audit, audit
from dpformer.trust.audit.setting import Setting, embedded, of_run

__all__ = ["Audit", "Setting", "audit", "embedded", "of_run"]
