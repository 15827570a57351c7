"""The policies of an engine: what its drafter drafts, and when n-grams replace that."""

from peagle.core import Method
from peagle.draft_shape import DraftShape
from peagle.engine.config import EngineConfig
from peagle.engine.ngram.host_slots import HostNgramSlots
from peagle.engine.ngram.policy import NgramPolicy
from peagle.engine.policy.adaptive import AdaptivePolicy
from peagle.engine.policy.candidates import candidate_shapes
from peagle.engine.policy.draft_policy import DraftPolicy, FixedPolicy
from peagle.engine.step.stepper import Stepper


def choose_draft_policy(config: EngineConfig, method: Method, shape: DraftShape) -> DraftPolicy:
    """`shape`: the largest draft of the drafter."""
    if config.k != "auto" or method == "none":
        return FixedPolicy(shape)
    return AdaptivePolicy(candidate_shapes(shape.k, 0 if shape.is_chain else shape.nodes))


def choose_ngram_policy(
    policy: DraftPolicy, stepper: Stepper, max_shape: DraftShape
) -> NgramPolicy | None:
    """On a CPU the host sees matches before it chooses a chain; `policy`: of the drafter."""
    ngram_slots = stepper.slots.ngram
    if not isinstance(ngram_slots, HostNgramSlots) or not max_shape.is_chain:
        return None
    has_drafter = stepper.drafter is not None
    ngram_slots.skips_drafter = has_drafter
    return NgramPolicy(policy, max_shape.k, has_drafter)
