"""A failed request or call as a message: an HTTP status, and a sentence for the client."""

import logging

from peagle.errors import UserError
from peagle.server.http.errors import ApiError, engine_stopped
from peagle.server.http.logs import log_event
from peagle.server.messages import Refusal


def refusal_of(request_id: int, error: BaseException) -> Refusal:
    from peagle.engine.device import is_device_lost
    from peagle.engine.schedule.queue import QueueFull

    if is_device_lost(error):
        error = engine_stopped()  # The pool has ended and logged it.
    if isinstance(error, ApiError):
        return Refusal(request_id, error.status, error.message, error.retry_after)
    if isinstance(error, QueueFull):
        return Refusal(request_id, 429, str(error), 1)
    if isinstance(error, UserError):
        return Refusal(request_id, 400, str(error))
    log_event("error", logging.ERROR, error)
    return Refusal(request_id, 500, "internal error")
