"""TokenizerThreads: threads that tokenize, so that no text delays the event loop or a shorter text.

Each lane has a queue and threads of its own: long prompts wait for long prompts only, and nobody
waits for texts that are only counted or decoded. The shortest texts are tokenized at once: passing
them to a thread and back takes longer, above all while the event loop is busy.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, TypeVar

from peagle.server.http.errors import ApiError

T = TypeVar("T")
Lane = Literal["short", "long", "utility"]
THREADS: dict[Lane, int] = {"short": 2, "long": 2, "utility": 1}
SHORT_CHARS = 1 << 14
IMMEDIATE_CHARS = 1 << 11  # Less than a millisecond.


class TokenizerThreads:
    def __init__(self, max_waiting: int) -> None:
        """`max_waiting` texts may wait or be tokenized in each lane."""
        self.max_waiting = max_waiting
        self._waiting = dict.fromkeys(THREADS, 0)
        self._lanes = {
            lane: ThreadPoolExecutor(count, f"peagle-tokenizer-{lane}")
            for lane, count in THREADS.items()
        }

    async def run(self, characters: int, work: Callable[[], T], is_prompt: bool = True) -> T:
        """Run `work` on a text of so many characters; `is_prompt`: an answer waits for it."""
        if characters <= IMMEDIATE_CHARS:
            return work()
        lane = choose_lane(characters, is_prompt)
        if self._waiting[lane] >= self.max_waiting:
            raise ApiError(
                429, f"{self._waiting[lane]} texts wait to be tokenized: try again", retry_after=1
            )
        self._waiting[lane] += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._lanes[lane], work)
        finally:
            self._waiting[lane] -= 1

    def close(self) -> None:
        for threads in self._lanes.values():
            threads.shutdown(wait=False, cancel_futures=True)


def choose_lane(characters: int, is_prompt: bool) -> Lane:
    if characters <= SHORT_CHARS:
        return "short"
    return "long" if is_prompt else "utility"
