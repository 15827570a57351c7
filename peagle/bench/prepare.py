"""From a bench command to a session: tasks, jobs, the pair, and what identifies the run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peagle.bench.environment import (
    describe_drafter,
    describe_environment,
    describe_target,
    public_name,
)
from peagle.bench.load.jobs import LoadJob, make_jobs
from peagle.bench.load.profile import fit_lengths, parse_profile
from peagle.bench.session import Session, jobs_digest
from peagle.bench.settings import BenchSettings
from peagle.core import DRAFTER_METHODS
from peagle.data.bench import Task, read_sets
from peagle.loaded import LoadedPair
from peagle.results.resume import result_path
from peagle.results.run_info import RunInfo
from peagle.results.writer import ResultWriter

if TYPE_CHECKING:
    from peagle.bench.load.endpoint import EndpointRunner

STEADY_TASKS_PER_USER = 4  # with fewer, a cell is mostly ramp-up and ramp-down
Warn = Callable[[str], None]
TasksBySet = Mapping[str, Sequence[Task]]
JobsBySet = Mapping[str, list[LoadJob]]


@dataclass(frozen=True, slots=True)
class BenchCommand:
    """A parsed command. Its settings have no sets yet, and no methods where none were named."""

    settings: BenchSettings
    sets: tuple[str, ...]  # names and files
    data_folder: Path | None
    out_folder: Path
    name: str | None
    command_line: str

    def read_tasks(self, warn: Warn) -> TasksBySet:
        if self.settings.profile is not None:
            parse_profile(self.settings.profile)  # refuse a bad one before anything is loaded
            if not self.sets:
                return {}
        return read_sets(list(self.sets), self.data_folder, self.settings.limit, warn)

    def session(self, methods: tuple[str, ...], jobs: JobsBySet, info: RunInfo) -> Session:
        """`info` has what the caller knows: pair, target, engine, drafters and environment."""
        settings = replace(self.settings, sets=tuple(jobs), methods=methods)
        info = replace(
            info,
            command=self.command_line,
            settings=settings.to_json(),
            tasks={name: jobs_digest(set_jobs) for name, set_jobs in jobs.items()},
        )
        path = result_path(self.out_folder, self.name, info)
        return Session(settings, jobs, ResultWriter(path, info))


def native_session(
    command: BenchCommand, tasks: TasksBySet, loaded: LoadedPair, warn: Warn
) -> Session:
    methods = command.settings.methods or ("none", *sorted(loaded.pair.drafters))
    drafters: dict[str, Any] = {
        method: describe_drafter(loaded, method) for method in methods if method in DRAFTER_METHODS
    }
    for method, drafter in drafters.items():
        if not drafter["trained"]:
            warn(f"the {method} drafter of this pair is untrained: its drafts are noise")
    jobs = session_jobs(tasks, command.settings, loaded, warn)
    info = RunInfo(
        pair=public_name(loaded.pair.name),
        target=describe_target(loaded.target),
        engine="native",
        drafters=drafters,
        environment=describe_environment(loaded.target.device),
    )
    return command.session(methods, jobs, info)


def endpoint_session(
    command: BenchCommand,
    tasks: TasksBySet,
    runner: "EndpointRunner",
    url: str,
    pair: str | None,
    warn: Warn,
) -> Session:
    methods = command.settings.methods or ("endpoint",)
    jobs = session_jobs(tasks, command.settings, None, warn)
    info = RunInfo(
        pair=public_name(pair or runner.model or "endpoint"),
        target={"name": runner.model or pair}
        | dict.fromkeys(("revision", "dtype", "weights", "sha")),
        engine="endpoint",
        endpoint=url,
        environment=describe_environment(),
    )
    return command.session(methods, jobs, info)


def session_jobs(
    tasks: TasksBySet, settings: BenchSettings, loaded: LoadedPair | None, warn: Warn
) -> dict[str, list[LoadJob]]:
    """The jobs of every set, and of the profile."""
    jobs = {
        name: make_jobs(set_tasks, settings.max_tokens, settings.seed, settings.ignore_eos)
        for name, set_tasks in tasks.items()
    }
    if settings.profile is not None:
        jobs |= profile_jobs(settings, settings.profile, loaded, warn)
    users = max(settings.concurrency)
    for name, set_jobs in jobs.items():
        count = len(set_jobs)
        if count < users:
            warn(f"{name} has {count} tasks: of {users} users no more than {count} are busy")
        elif count < STEADY_TASKS_PER_USER * users:
            warn(f"{name} has {count} tasks: with {users} users it mostly ramps up and down")
    return jobs


def profile_jobs(
    settings: BenchSettings, text: str, loaded: LoadedPair | None, warn: Warn
) -> dict[str, list[LoadJob]]:
    profile = parse_profile(text)
    count = min(settings.limit or profile.count, profile.count)
    tasks = profile.tasks(settings.seed, token_counter(loaded))[:count]
    lengths = profile.lengths(settings.seed)[:count]
    if loaded is not None:
        longest_prompt = max(len(loaded.encode(task.turns[0])) for task in tasks)
        lengths = fit_lengths(lengths, loaded.target.context - longest_prompt - 1, warn)
    return {profile.name: make_jobs(tasks, settings.max_tokens, settings.seed, lengths=lengths)}


def token_counter(loaded: LoadedPair | None) -> Callable[[str], int] | None:
    tokenizer = loaded.target.tokenizer if loaded is not None else None
    return None if tokenizer is None else lambda text: len(tokenizer(text)["input_ids"])
