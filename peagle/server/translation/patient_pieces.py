"""The pieces of a chat answer, with a sign of life where none arrives for a while.

Tool calls are held back until they are complete, and long prompts take their time: clients and
proxies give up on a stream that is silent for too long.
"""

import asyncio
from collections.abc import AsyncIterator

from peagle.server.openai.chat_answer import ChatAnswer, ChatPiece

SILENCE_SECONDS = 10.0


async def patient_pieces(
    chat_answer: ChatAnswer, single: bool = False, silence: float = SILENCE_SECONDS
) -> AsyncIterator[ChatPiece | None]:
    """The pieces, and None whenever none has arrived for so many seconds."""
    while True:
        waiting = asyncio.ensure_future(chat_answer.next(single))
        try:
            while not waiting.done():
                await asyncio.wait({waiting}, timeout=silence)
                if not waiting.done():
                    yield None
        finally:
            waiting.cancel()
        piece = waiting.result()
        if piece is None:
            return
        yield piece
