"""LearnerSupervisor: the trainer process, whose failures do not affect serving."""

import asyncio
import json
import logging
from pathlib import Path

import pytest

from peagle.errors import UserError
from peagle.learn.settings import learner_settings_from_json
from peagle.server.engine_process import learner_supervisor
from peagle.server.engine_process.learner_supervisor import LearnerSupervisor
from peagle.server.http.errors import ApiError
from peagle.server.messages import EngineInfo, EngineKey, LearnReport, TargetInfo, WorkerStatus
from peagle.server.settings import ServerSettings
from peagle.server.vllm.gateway import no_versions

SETTINGS = ServerSettings(
    pair="tiny", device="cpu", learn="folder", learn_time=0.05, api_keys=("secret",), backoff=0.05
)


def status(**learn: str) -> WorkerStatus:
    key = EngineKey("p-eagle", 3)
    target = TargetInfo("tiny", "", [], EngineInfo("p-eagle", 64, 96), key, ["p-eagle"])
    return WorkerStatus(target, learn=LearnReport(drafter="/drafter", **learn))


def test_the_command_of_the_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEAGLE_API_KEY", "secret")
    statuses = [None, None, status()]
    supervisor = LearnerSupervisor(SETTINGS, tmp_path, lambda: statuses.pop(0))
    monkeypatch.setattr(learner_supervisor, "POLL_SECONDS", 0.0)
    asyncio.run(supervisor.prepare())  # Wait for an engine that is ready.
    spec = supervisor.launch_spec()
    assert spec.command[1:4] == ("-m", "peagle.learn.process", "folder")
    settings = learner_settings_from_json(spec.command[4])
    assert (settings.pair, settings.drafter, settings.method) == ("tiny", "/drafter", "p-eagle")
    assert (settings.device, settings.time_share, settings.memory_gib) == ("cpu", 0.05, 8.0)
    assert "secret" not in json.dumps([spec.command, dict(spec.environment)])


def test_an_engine_that_does_not_learn_is_an_error(tmp_path: Path) -> None:
    supervisor = LearnerSupervisor(SETTINGS, tmp_path, lambda: status(failure="another target"))
    with pytest.raises(UserError, match="another target"):
        asyncio.run(supervisor.prepare())


def test_the_trainer_is_not_restarted_after_a_usage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A usage error would repeat, so the server continues without a trainer."""
    monkeypatch.setattr(learner_supervisor, "LEARNER_MODULE", "argparse_error")
    (tmp_path / "argparse_error.py").write_text("import sys; sys.exit('x' and 2)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    supervisor = LearnerSupervisor(SETTINGS, tmp_path, status)
    monkeypatch.setattr(logging.getLogger("peagle.server"), "propagate", True)
    asyncio.run(asyncio.wait_for(supervisor.run_beside(), 60))
    assert supervisor.state == "closed" and supervisor.restarts == 0
    assert "the trainer is off" in [record.getMessage() for record in caplog.records]


def test_a_trainer_that_dies_is_restarted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner_supervisor, "LEARNER_MODULE", "dies")
    (tmp_path / "dies.py").write_text("import os; os.abort()")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    async def main() -> int:
        supervisor = LearnerSupervisor(SETTINGS, tmp_path, status)
        task = asyncio.create_task(supervisor.run_beside())
        while supervisor.restarts < 2:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return supervisor.restarts

    assert asyncio.run(asyncio.wait_for(main(), 60)) >= 2


def test_vllm_has_no_versions() -> None:
    with pytest.raises(ApiError, match="no versions") as refused:
        asyncio.run(no_versions(None, {}))  # type: ignore[arg-type]
    assert refused.value.status == 404
