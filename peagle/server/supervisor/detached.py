"""Work on a thread that does not keep the server from exiting."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


async def run_detached(work: Callable[[], T]) -> T:
    future: Future[T] = Future()

    def run() -> None:
        with suppress(InvalidStateError):  # the future was canceled meanwhile
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(future)
