"""Errors of the HTTP interface, in OpenAI's JSON form."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from windlass.base.errors import EngineOverloadedError, RequestError, WindlassError

_TYPE_OF_STATUS = {
    401: "authentication_error",
    429: "rate_limit_error",
    500: "internal_server_error",
    502: "internal_server_error",
    503: "service_unavailable_error",
}


class ApiError(WindlassError):
    """Error of a request that the server refuses or cannot finish.

    Attributes:
        status: HTTP status.
        parameter: name of the invalid field, if there is one.
        code: OpenAI's code for the kind of error, if there is one.
        retry_after: seconds after which the client may send the request again; None: the answer gives no time.
        closes_connection: True: the rest of the request was not read, so the connection cannot take another request.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        parameter: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        closes_connection: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.parameter = parameter
        self.code = code
        self.retry_after = retry_after
        self.closes_connection = closes_connection

    def body(self) -> dict[str, Any]:
        """Return the JSON body."""
        kind = _TYPE_OF_STATUS.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.parameter, "code": self.code}}

    def response(self) -> Response:
        """Return the HTTP response."""
        headers = {}
        if self.retry_after is not None:
            headers["retry-after"] = str(self.retry_after)
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        if self.closes_connection:
            headers["connection"] = "close"
        return json_response(self.body(), self.status, headers)


def json_response(
    data: Any, status: int = 200, headers: Mapping[str, str] | None = None, *, is_long: bool = False
) -> Response:
    """Return a JSON response in UTF-8. Lone surrogates, which UTF-8 cannot hold, become `?`.

    Args:
        is_long: see `encode_json`.
    """
    text = encode_json(json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")), data, is_long)
    return Response(text.encode("utf-8", "replace"), status, headers, media_type="application/json")


def encode_json(encoder: json.JSONEncoder, data: Any, is_long: bool = False) -> str:
    """Return the JSON of `data`.

    Args:
        is_long: encode in Python, which lets other threads run meanwhile. The encoder in C, which is about three times
            as fast, holds the interpreter lock until all of `data` is encoded.
    """
    return "".join(encoder.iterencode(data)) if is_long else encoder.encode(data)


def api_error_of(error: BaseException, request_id: str) -> ApiError:
    """Return the error that the client receives for an error of the engine.

    The text of an unexpected error stays in the log: it can hold paths and values of other requests.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineOverloadedError):
        return ApiError(429, str(error), code="queue_full", retry_after=error.retry_after)
    if isinstance(error, RequestError):
        return ApiError(400, str(error), parameter=error.parameter)
    return ApiError(
        500, f"internal error; the server's log has its cause under the id {request_id}", code="internal_error"
    )
