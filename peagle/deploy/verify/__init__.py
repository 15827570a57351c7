"""`peagle verify`: whether a live endpoint speculates, the proof, and the cause if it does not."""

from peagle.deploy.verify.endpoint import Endpoint
from peagle.deploy.verify.proof import verify
from peagle.deploy.verify.verification import Comparison, Verification

__all__ = ["Comparison", "Endpoint", "Verification", "verify"]
