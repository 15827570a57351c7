"""The speculation counters that a vLLM server exports on /metrics."""

import re

from peagle.results.spec_counters import SpecCounters

SPEC_COUNTER = re.compile(
    r"^vllm:spec_decode_num_(\w+?)(?:_total)?(?:\{(.*)\})?\s+([0-9.eE+-]+)\s*$", re.MULTILINE
)
POSITION_LABEL = re.compile(r'position="(\d+)"')


def parse_metrics(text: str) -> SpecCounters | None:
    """vLLM's speculation counters, summed over its engines; None where there are none."""
    spec = SpecCounters()
    exported = False
    accepted_at: dict[int, int] = {}
    for name, labels, value in SPEC_COUNTER.findall(text):
        count = int(float(value))
        if name == "drafts":
            spec.drafts += count
            exported = True
        elif name == "draft_tokens":
            spec.draft_tokens += count
        elif name == "accepted_tokens":
            spec.accepted += count
        elif name == "accepted_tokens_per_pos" and (label := POSITION_LABEL.search(labels)):
            position = int(label[1])
            accepted_at[position] = accepted_at.get(position, 0) + count
    if not exported:
        return None
    if accepted_at:
        spec.accepted_at = [accepted_at.get(i, 0) for i in range(max(accepted_at) + 1)]
    spec.tried_at = [spec.drafts] * len(spec.accepted_at)
    return spec
