"""From what was asked for to a session: tasks, jobs, the pair, and what identifies the run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peagle.bench import FORMAT
from peagle.bench.environment import drafter_of, environment, named, target_of
from peagle.bench.load.jobs import LoadJob, jobs_of
from peagle.bench.load.profile import fit, parse_profile
from peagle.bench.results import Results, path_of
from peagle.bench.session import Session, digest
from peagle.bench.settings import BenchSettings
from peagle.data.bench import Task, read_sets
from peagle.loaded import LoadedPair

if TYPE_CHECKING:
    from peagle.bench.load.endpoint import EndpointRunner

STEADY = 4  # so many tasks for every user, or a cell is mostly ramp
Warn = Callable[[str], None]
Tasks = Mapping[str, Sequence[Task]]


@dataclass(frozen=True, slots=True)
class Asked:
    """A command, read but not yet looked up: its settings have no sets, and maybe no methods."""

    settings: BenchSettings
    words: tuple[str, ...]  # sets: names and files
    data: Path | None
    out: Path
    name: str | None
    command: str

    def tasks(self, warn: Warn) -> Tasks:
        if self.settings.profile is not None:
            parse_profile(self.settings.profile)
            if not self.words:
                return {}
        return read_sets(list(self.words), self.data, self.settings.limit, warn)

    def session(
        self, settings: BenchSettings, jobs: Mapping[str, list[LoadJob]], told: Mapping[str, Any]
    ) -> Session:
        """`told`: pair, target, engine, endpoint, drafters, environment."""
        head = {
            "format": FORMAT,
            "command": self.command,
            **told,
            "settings": settings.as_dict(),
            "tasks": {name: digest(found) for name, found in jobs.items()},
        }
        path = path_of(self.out, self.name, told["pair"], head)
        return Session(settings, jobs, Results(path, head))


def native_session(asked: Asked, tasks: Tasks, loaded: LoadedPair, warn: Warn) -> Session:
    methods = asked.settings.methods or ("none", *sorted(loaded.pair.drafters))
    drafters = {method: drafter_of(loaded, method) for method in methods if method != "none"}
    for method, told in drafters.items():
        if not told["trained"]:
            warn(f"the {method} drafter of this pair is untrained: its drafts are noise")
    jobs = make_jobs(tasks, asked.settings, loaded, warn)
    told = {
        "pair": named(loaded.pair.name),
        "target": target_of(loaded.target),
        "engine": "native",
        "endpoint": None,
        "drafters": drafters,
        "environment": environment(loaded.target.device),
    }
    return asked.session(replace(asked.settings, sets=tuple(jobs), methods=methods), jobs, told)


def endpoint_session(
    asked: Asked, tasks: Tasks, endpoint: "EndpointRunner", url: str, pair: str | None, warn: Warn
) -> Session:
    methods = asked.settings.methods or ("endpoint",)
    jobs = make_jobs(tasks, asked.settings, None, warn)
    told = {
        "pair": named(pair or endpoint.model or "endpoint"),
        "target": {"name": endpoint.model or pair, "revision": None, "dtype": None, "sha": None},
        "engine": "endpoint",
        "endpoint": url,
        "drafters": {},
        "environment": environment(),
    }
    return asked.session(replace(asked.settings, sets=tuple(jobs), methods=methods), jobs, told)


def make_jobs(
    tasks: Tasks, how: BenchSettings, loaded: LoadedPair | None, warn: Warn
) -> dict[str, list[LoadJob]]:
    """Of every set, and of the profile."""
    jobs = {
        name: jobs_of(found, how.max_tokens, how.seed, how.ignore_eos)
        for name, found in tasks.items()
    }
    if how.profile is not None:
        jobs |= profile_jobs(how, loaded, warn)
    most = max(how.concurrency)
    for name, found in jobs.items():
        if len(found) < most:
            warn(
                f"{name} has {len(found)} tasks: at --concurrency {most} no more than {len(found)} run at a time"
            )
        elif len(found) < STEADY * most:
            warn(
                f"{name} has {len(found)} tasks: at --concurrency {most} the load mostly ramps up and down"
            )
    return jobs


def profile_jobs(
    how: BenchSettings, loaded: LoadedPair | None, warn: Warn
) -> dict[str, list[LoadJob]]:
    assert how.profile is not None
    wanted = parse_profile(how.profile)
    tokenizer = loaded.target.tokenizer if loaded is not None else None
    size = (lambda text: len(tokenizer(text)["input_ids"])) if tokenizer is not None else None
    count = min(how.limit or wanted.count, wanted.count)
    tasks, lengths = wanted.tasks(how.seed, size)[:count], wanted.lengths(how.seed)[:count]
    if loaded is not None:
        longest = max(len(loaded.encode(task.turns[0])) for task in tasks)
        lengths = fit(lengths, loaded.target.context - longest - 1, warn)
    return {wanted.name: jobs_of(tasks, how.max_tokens, how.seed, lengths=lengths)}
