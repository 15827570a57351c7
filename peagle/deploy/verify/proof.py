"""The proof that an endpoint speculates: drafts were accepted while it answered a few prompts.

Evidence, best first:

    answers        `metrics.speculative_decoding` of every answer
    metrics        vLLM's counters on /metrics, before and after the answers
    logs           the counts that vLLM writes to its log (SageMaker)
    configuration  no speculative config in the environment of a container (SageMaker)
"""

from peagle.deploy.verify.answer import Answer, sum_spec, tokens_per_chunk
from peagle.deploy.verify.endpoint import Cause, Endpoint, Observation
from peagle.deploy.verify.verification import Comparison, Verification
from peagle.errors import UserError

PROMPTS = (
    "Write a Python function that returns the n-th Fibonacci number.",
    "Count from one to thirty in words, separated by commas.",
    "Explain in three sentences why the sky is blue.",
    "List the months of the year and the number of days of each.",
)
REJECTED = Cause(
    "the server drafts, but the target accepts none of the drafts:"
    " the drafter was trained for another target, or not at all",
    "use the drafter that was trained for this target; `peagle check` examines a drafter",
)
UNEQUAL = Cause(
    "the greedy answers with drafts differ from those without",
    "in bfloat16 and float16 they can differ where two tokens are nearly equally probable:"
    " compare servers with --dtype float32, or start peagle serve with --exact",
)


def verify(endpoint: Endpoint, max_tokens: int, reference: Endpoint | None = None) -> Verification:
    """Send the prompts and judge; compare with `reference`, the same target without drafter."""
    result = Verification(endpoint.name, endpoint.kind, endpoint.model, len(PROMPTS))
    answers, observation = ask_all(endpoint, max_tokens)
    add_speed(result, answers)
    if observation is None:
        describe_unproven(result, endpoint, answers)
    else:
        judge(result, endpoint, observation)
    compare(result, endpoint, answers, max_tokens, reference)
    return result


def ask_all(
    endpoint: Endpoint, max_tokens: int, drafts: bool = True
) -> tuple[list[Answer], Observation | None]:
    observe = endpoint.watch()
    answers = [endpoint.ask(prompt, max_tokens, drafts) for prompt in PROMPTS]
    spec = sum_spec(answers)
    return answers, Observation("answers", spec) if spec is not None else observe()


def add_speed(result: Verification, answers: list[Answer]) -> None:
    result.tokens = sum(answer.tokens for answer in answers)
    seconds = sum(answer.seconds for answer in answers)
    result.tokens_per_second = round(result.tokens / max(seconds, 1e-9), 1)


def judge(result: Verification, endpoint: Endpoint, observation: Observation) -> None:
    result.evidence = observation.evidence
    spec = observation.spec
    if spec is not None and observation.evidence in ("metrics", "logs"):
        result.notes.append("the counts may include other requests at the same time")
    if spec is not None:
        result.acceptance_length = round(spec.acceptance_length, 4)
        result.drafts = spec.drafts
        result.draft_tokens = spec.draft_tokens
        result.accepted_tokens = spec.accepted
    if spec is not None and spec.accepted > 0:
        result.verdict = "speculating"
        return
    result.verdict = "not speculating"
    drafted = spec is not None and spec.drafts > 0
    result.cause, result.fix = REJECTED if drafted else endpoint.explain(spec is not None)


def describe_unproven(result: Verification, endpoint: Endpoint, answers: list[Answer]) -> None:
    result.cause = "neither the answers nor the server say how many drafts were accepted"
    result.fix = endpoint.evidence_fix
    rate = tokens_per_chunk(answers)
    if rate is not None:
        result.notes.append(f"a chunk of a stream holds {rate:.2f} tokens on average: no proof")


def compare(
    result: Verification,
    endpoint: Endpoint,
    answers: list[Answer],
    max_tokens: int,
    reference: Endpoint | None,
) -> None:
    """Compare with `reference`, or with the server's own answers without drafts."""
    if reference is None and result.verdict == "not speculating":
        return
    if reference is None and not endpoint.has_switch:
        result.notes.append(
            "the answers were not compared: give `reference`, the same target without drafter"
        )
        return
    source = reference or endpoint
    try:
        plain, observation = ask_all(source, max_tokens, drafts=source is not endpoint)
    except UserError as error:
        if reference is not None:
            raise
        result.notes.append(f"the answers were not compared, give `reference`: {error}")
        return
    if observation is not None and observation.spec is not None and observation.spec.drafts:
        result.notes.append(f"{source.name} drafts too, so the comparison proves nothing")
    equal = sum(a.text == b.text for a, b in zip(answers, plain, strict=True))
    without = "the same server, method none" if source is endpoint else source.name
    result.comparison = Comparison(without, len(plain), equal)
    if equal < len(plain) and result.cause is None:
        result.cause, result.fix = UNEQUAL
