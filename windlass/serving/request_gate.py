"""Middleware of all endpoints: request ids, API keys, refusal while the server is not ready, counts, and errors."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from windlass.base.log import logger
from windlass.serving.api_errors import ApiError, api_error_of
from windlass.serving.request_counter import RequestCounter
from windlass.serving.request_id import request_id_of
from windlass.serving.server_metrics import HttpMetrics
from windlass.serving.server_settings import ServerSettings

PUBLIC_PATHS = frozenset({"/", "/health", "/ready", "/version", "/metrics"})
"""Paths that need no API key and are answered even while the server is not ready."""

API_PATHS = frozenset(
    {
        *("/v1/models", "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings"),
        *("/tokenize", "/detokenize"),
    }
)


class RequestGate:
    """ASGI middleware that checks and counts each request, sets its id, and turns errors into responses."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, counter: RequestCounter, metrics: HttpMetrics) -> None:
        self._app = app
        self._settings = settings
        self._counter = counter
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Reject a request, or pass it on to the application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        path = scope["path"]
        request_id = request_id_of(headers.get("x-request-id", ""))
        scope.setdefault("state", {}).update(request_id=request_id, counter=self._counter)
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), (b"x-request-id", request_id.encode())]
            await send(message)

        counted = path not in PUBLIC_PATHS
        if counted:
            self._counter.enter()
        try:
            if counted:
                self._check_key(headers)
                self._counter.refuse_unless_ready()
            await self._app(scope, receive, send_with_id)
        except ClientDisconnect:
            status = 499
        except Exception as error:
            known = api_error_of(error, request_id)
            if known.status == 500:
                logger.error("request %s failed", request_id, exc_info=error)
            if not status:
                await known.response()(scope, receive, send_with_id)
        finally:
            if counted:
                self._counter.leave()
            known_path = path if path in PUBLIC_PATHS or path in API_PATHS else "other"
            self._metrics.count(known_path, status)

    def _check_key(self, headers: Headers) -> None:
        keys = self._settings.api_keys
        if keys is None:
            return
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise ApiError(401, "the request has no API key; send it as `Authorization: Bearer KEY`", code="no_api_key")
        # compare the bytes that were sent: Starlette has decoded them as Latin-1
        if not keys.accept(key.encode("latin-1").strip()):
            raise ApiError(401, "the API key is not one of this server's", code="invalid_api_key")
