"""GET and POST /v1/peagle/drafter: the versions of the drafter, and which one serves.

A POST writes current.json, which every engine process follows (worker/drafter_versions.py), and
answers when all of them draft with that version. If one of them cannot, the former version returns.
"""

import asyncio
import time
from contextlib import suppress
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from peagle.errors import UserError
from peagle.learn.events import append_event
from peagle.learn.folder import LearnFolder
from peagle.learn.versions import (
    CurrentVersion,
    lineage,
    list_versions,
    read_current,
    rollback,
    set_current,
)
from peagle.server.front.engine_backend import EngineBackend, engine_backend_of
from peagle.server.http.errors import ApiError
from peagle.server.http.limits import parse_model
from peagle.server.http.schema import DrafterRequest
from peagle.server.learning.folder_state import describe_drafter

SWAP_SECONDS = 60.0
POLL_SECONDS = 0.05


async def show_drafter(request: Request, _: dict[str, Any]) -> Response:
    backend = engine_backend_of(request)
    require_folder(backend)
    await backend.refresh()
    return JSONResponse(describe_drafter(backend.learn_state, backend.counts.learn_reports()))


async def change_drafter(request: Request, body: dict[str, Any]) -> Response:
    backend = engine_backend_of(request)
    folder = require_folder(backend)
    change = parse_model(DrafterRequest, body)
    await backend.refresh()
    for report in backend.counts.learn_reports().values():
        if report.failure is not None:
            raise ApiError(409, f"learning is off: {report.failure}")
    before, current = await asyncio.to_thread(change_current, folder, change)
    await wait_for_version(backend, folder, before, current)
    return await show_drafter(request, {})


def require_folder(backend: EngineBackend) -> LearnFolder:
    if backend.learn_folder is None:
        raise ApiError(404, "this server does not learn: start it with --learn DIR")
    return backend.learn_folder


def change_current(
    folder: LearnFolder, change: DrafterRequest
) -> tuple[CurrentVersion, CurrentVersion]:
    """Write current.json. Returns the version before and now; on a thread."""
    number = change.version
    known = {0, *(record.number for record in list_versions(folder))}
    if number is not None and number not in known:
        raise ApiError(404, f"there is no version {number}: GET /v1/peagle/drafter lists them")
    try:
        before = read_current(folder)
        if number is None or (number != before.number and is_before(folder, number, before)):
            current = rollback(folder, number)
            append_event(folder.events, "rolled back", current.reason, current.number)
        elif number != before.number:
            current = set_current(folder, number, "chosen by a request")
            append_event(folder.events, "promoted", current.reason, number)
        else:
            current = before
    except UserError as error:
        raise ApiError(409, str(error)) from error
    except OSError as error:
        raise ApiError(507, f"the version cannot be written: {error}") from error
    return before, current


def restore(folder: LearnFolder, before: CurrentVersion, current: CurrentVersion) -> None:
    """Return to the former version, unless there is another one by now; on a thread."""
    with suppress(UserError, OSError):  # The reason of the failure is answered.
        if read_current(folder) == current:
            set_current(folder, before.number, f"version {current.number} cannot be loaded")


def is_before(folder: LearnFolder, number: int, current: CurrentVersion) -> bool:
    """Whether the current version was trained from this one, directly or not."""
    return number == 0 or number in lineage(folder, current.number)


async def wait_for_version(
    backend: EngineBackend, folder: LearnFolder, before: CurrentVersion, current: CurrentVersion
) -> None:
    end = time.monotonic() + SWAP_SECONDS
    while time.monotonic() < end:
        await backend.engines.refresh()
        reports = backend.counts.learn_reports()
        for report in reports.values():
            if report.failed_version == current.number and report.version_failure:
                await asyncio.to_thread(restore, folder, before, current)
                raise ApiError(409, f"version {current.number}: {report.version_failure}")
        if reports and all(report.version == current.number for report in reports.values()):
            return
        await asyncio.sleep(POLL_SECONDS)
    raise ApiError(504, f"version {current.number} is not in use after {SWAP_SECONDS:g} seconds")
