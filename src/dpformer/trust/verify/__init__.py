"""The checks behind `dpformer verify`: of a run folder, of a user's own module, of every model that comes with the package."""

from dpformer.trust.verify.checks import Check, Verification
from dpformer.trust.verify.module import verify_module
from dpformer.trust.verify.run import verify_built_in, verify_run

__all__ = ["Check", "Verification", "verify_built_in", "verify_module", "verify_run"]
