"""The body of POST /v1/peagle/drafter: the version of the drafter that serves from now on."""

from typing import Annotated

from pydantic import Field

from peagle.server.http.errors import ApiError
from peagle.server.http.schema.base import MAX_INT, RequestModel


class DrafterRequest(RequestModel):
    version: Annotated[int, Field(ge=0, le=MAX_INT)] | None = None
    rollback: bool | None = None

    def check(self) -> None:
        if (self.version is None) == (not self.rollback):
            raise ApiError(400, 'give either {"version": N} or {"rollback": true}')
