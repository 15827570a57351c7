"""The decode step of all slots equals separate passes of the target for each slot."""

import pytest
import torch

from peagle.regenerate.decode_step import PAGE_SIZE, DecodeStep
from peagle.target import Target
from tests.support.models.chat_targets import plain
from tests.support.models.tiny_models import make_target


def started(target: Target, prompts: list[list[int]], limit: int = 30) -> DecodeStep:
    step = DecodeStep(target, len(prompts), 3 * PAGE_SIZE)
    slots = list(range(len(prompts)))
    step.prefill(slots, prompts)
    step.start(slots, [limit] * len(prompts), [0.0] * len(prompts))
    return step


def random_prompt(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(6, 96, (length,), generator=generator).tolist()


@pytest.mark.parametrize(
    "lengths", [[1], [1, 2], [PAGE_SIZE], [PAGE_SIZE + 1, 3], [100, 1, 63, 64]]
)
def test_slots_of_any_length_are_independent(target: Target, lengths: list[int]) -> None:
    prompts = [random_prompt(length) for length in lengths]
    step = started(target, prompts)
    step.run(30, greedy=True)
    snapshot = step.snapshot(tail=1)
    for slot, prompt in enumerate(prompts):
        answer = plain(target, prompt, 30)
        assert step.read_answers([slot], int(snapshot.counts[slot])) == [answer]
        assert snapshot.tails[slot, 0] == answer[-1]


def test_a_finished_slot_does_not_change(target: Target) -> None:
    step = started(target, [random_prompt(5), random_prompt(9)], limit=4)
    step.run(4, greedy=True)
    before = step.snapshot(tail=4)
    step.run(8, greedy=True)
    after = step.snapshot(tail=4)
    assert before.done.all()
    assert (before.counts == after.counts).all() and (before.tails == after.tails).all()


def test_a_freed_slot_serves_the_next_request(target: Target) -> None:
    step = started(target, [random_prompt(90), random_prompt(20)])
    step.run(10, greedy=True)
    step.free([0])
    step.prefill([0], [random_prompt(7)])
    step.start([0], [12], [0.0])
    step.run(12, greedy=True)
    answer = plain(target, random_prompt(7), 12)
    assert step.read_answers([0], len(answer)) == [answer]


def test_the_result_of_a_short_answer_is_padded(target: Target) -> None:
    step = started(target, [random_prompt(5)], limit=3)
    step.run(3, greedy=True)
    tail = step.snapshot(tail=6).tails[0].tolist()
    assert tail[:3] == [-3, -2, -1] and min(tail[3:]) >= 0


def test_other_architectures_run_through_transformers() -> None:
    target = make_target("gpt-oss")
    prompts = [random_prompt(11), random_prompt(40)]
    step = started(target, prompts)
    step.run(20, greedy=True)
    for slot, prompt in enumerate(prompts):
        answer = plain(target, prompt, 20)
        assert step.read_answers([slot], len(answer)) == [answer]
