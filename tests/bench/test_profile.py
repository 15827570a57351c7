"""Answers of given lengths: distributed as requested, reproducible, cut to the context."""

import numpy as np
import pytest

from peagle.bench.load.profile import Profile, fit_lengths, parse_profile
from peagle.errors import UserError


def test_lengths_follow_the_profile() -> None:
    lengths = Profile("x", 3900, 10800, count=20000).lengths(seed=1)
    assert np.median(lengths) == pytest.approx(3900, rel=0.03)
    assert np.percentile(lengths, 90) == pytest.approx(10800, rel=0.04)
    assert lengths == Profile("x", 3900, 10800, count=20000).lengths(seed=1)
    assert lengths != Profile("x", 3900, 10800, count=20000).lengths(seed=2)


def test_prompts_have_the_requested_length() -> None:
    tasks = Profile("x", 10, 20, prompt=200, count=5).tasks(0, lambda text: len(text.split()))
    assert all(185 <= len(task.turns[0].split()) <= 200 for task in tasks)
    assert len({task.turns[0] for task in tasks}) == 5
    assert Profile("x", 10, 20, prompt=1).tasks(0)[0].turns[0]


def test_profiles_are_parsed() -> None:
    known = parse_profile("reasoning")
    assert (known.median, known.p90, known.prompt, known.name) == (3900, 10800, 512, "reasoning")
    assert parse_profile("median=100,p90=300,count=4").count == 4
    for bad in (
        "reasonin",
        "median=3",
        "median=a,p90=b",
        "median=5,p90=9,x=1",
        "median=9,p90=5",
        "median=1,p90=2,count=0",
    ):
        with pytest.raises(UserError):
            parse_profile(bad)
    with pytest.raises(UserError, match="Did you mean 'reasoning'"):
        parse_profile("reasonin")


def test_lengths_are_cut_to_the_context() -> None:
    warnings: list[str] = []
    assert fit_lengths([5, 50, 500], 60, warnings.append) == [5, 50, 60]
    assert warnings == [
        "1 of 3 answers of the profile are cut to 60 tokens: the context holds no more"
    ]
    assert fit_lengths([5], 60, warnings.append) == [5] and len(warnings) == 1
    with pytest.raises(UserError, match="smaller prompt="):
        fit_lengths([5], 0, warnings.append)
