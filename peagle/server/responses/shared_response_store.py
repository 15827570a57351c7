"""SharedResponseStore: the responses that the web server processes of one server share.

Requests of one client reach any of them. The responses are in a SQLite file in the folder of the
server's sockets, which no other user can read, and which is removed when the server ends. Limits
and access are those of ResponseStore.
"""

import logging
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from peagle.server.http.errors import ApiError
from peagle.server.http.logs import log_event
from peagle.server.responses.response_store import (
    KEY_SHARE,
    MAX_BYTES,
    MAX_RESPONSES,
    StoredResponse,
)

PATH_VARIABLE = "PEAGLE_RESPONSES"  # The file, in the environment of web server processes.
LOCK_SECONDS = 5.0  # For another process to finish its change.
# `size` is before the large columns: SQLite reads a row up to the last column that a query needs.
TABLE = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, key_digest BLOB, salt TEXT, size INTEGER, response BLOB, messages BLOB
)
"""
INSERT = """
INSERT OR REPLACE INTO responses (id, key_digest, salt, size, response, messages)
VALUES (?, ?, ?, ?, ?, ?)
"""
# Older responses than those that fit, newest first.
SURPLUS = """
DELETE FROM responses WHERE id IN (
    SELECT id FROM (
        SELECT id, ROW_NUMBER() OVER newest AS number, SUM(size) OVER newest AS bytes
        FROM responses WHERE {condition} WINDOW newest AS (ORDER BY rowid DESC)
    ) WHERE number > ? OR bytes > ?
)
"""


class SharedResponseStore:
    def __init__(
        self,
        path: Path,
        keys: int = 1,
        max_responses: int = MAX_RESPONSES,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        """`keys`: number of API keys."""
        share = KEY_SHARE if keys > 1 else 1
        self._limits = (max_responses, max_bytes)
        self._key_limits = (max_responses // share, max_bytes // share)
        path.touch(mode=0o600)
        # Created where the routes are, used by the event loop only.
        self._database = sqlite3.connect(
            path, timeout=LOCK_SECONDS, isolation_level=None, check_same_thread=False
        )
        self._database.execute("PRAGMA journal_mode = WAL")  # Readers do not wait for a writer.
        self._database.execute("PRAGMA synchronous = OFF")  # It does not outlive the server.
        self._database.execute(TABLE)

    def __len__(self) -> int:
        return int(self._database.execute("SELECT COUNT(*) FROM responses").fetchone()[0])

    @property
    def size(self) -> int:
        query = "SELECT COALESCE(SUM(size), 0) FROM responses"
        return int(self._database.execute(query).fetchone()[0])

    def put(self, response_id: str, stored: StoredResponse) -> None:
        """Keep a response, unless it is larger than all that its key may store.

        An answer is complete by now: it is sent even if the database fails.
        """
        if stored.size > self._key_limits[1]:
            return
        try:
            self._insert(response_id, stored)
        except sqlite3.Error as error:
            log_event("response not stored", logging.WARNING, id=response_id, reason=str(error))

    def _insert(self, response_id: str, stored: StoredResponse) -> None:
        row = (stored.key_digest, stored.salt, stored.size, stored.response, stored.messages)
        with self._database:
            self._database.execute("BEGIN IMMEDIATE")
            self._database.execute(INSERT, (response_id, *row))
            own = SURPLUS.format(condition="key_digest = ?")
            self._database.execute(own, (stored.key_digest, *self._key_limits))
            self._database.execute(SURPLUS.format(condition="TRUE"), self._limits)

    def get(self, response_id: str, salt: str) -> StoredResponse | None:
        query = (
            "SELECT key_digest, salt, response, messages FROM responses WHERE id = ? AND salt = ?"
        )
        with failures_as_unavailable():
            row = self._database.execute(query, (response_id, salt)).fetchone()
        return StoredResponse(*row) if row is not None else None

    def delete(self, response_id: str, salt: str) -> bool:
        """Return whether there was one."""
        query = "DELETE FROM responses WHERE id = ? AND salt = ?"
        with failures_as_unavailable():
            return self._database.execute(query, (response_id, salt)).rowcount > 0


@contextmanager
def failures_as_unavailable() -> Iterator[None]:
    """A locked or full database is a temporary error of the server."""
    try:
        yield
    except sqlite3.Error as error:
        message = f"stored responses cannot be reached now ({error}): try again later"
        raise ApiError(503, message, retry_after=1) from error


def shared_store_path() -> Path:
    return Path(os.environ[PATH_VARIABLE])
