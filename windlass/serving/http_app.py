"""Application with all endpoints of one engine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from windlass.base.text import one_line
from windlass.serving.api_errors import ApiError, api_error_of
from windlass.serving.chat_endpoint import create_chat_completion
from windlass.serving.completions_endpoint import create_completion
from windlass.serving.embeddings_endpoint import create_embeddings
from windlass.serving.request_gate import RequestGate
from windlass.serving.request_id import request_id_of
from windlass.serving.responses_endpoint import create_response
from windlass.serving.server_context import ServerContext
from windlass.serving.server_settings import ServerSettings
from windlass.serving.status_endpoints import (
    list_models,
    show_health,
    show_metrics,
    show_model,
    show_page,
    show_readiness,
    show_version,
)
from windlass.serving.tokenizer_endpoints import detokenize, tokenize

# Response headers that scripts may read. Requests may have any headers: OpenAI's client for browsers adds several.
_EXPOSED_HEADERS = ("X-Request-Id", "Retry-After")
_STATUS_ROUTES: tuple[tuple[str, Callable[[Request], Awaitable[Response]]], ...] = (
    ("/", show_page),
    ("/health", show_health),
    ("/ready", show_readiness),
    ("/version", show_version),
    ("/metrics", show_metrics),
    ("/v1/models", list_models),
    ("/v1/models/{model:path}", show_model),
)
_API_ROUTES: tuple[tuple[str, Callable[[Request], Awaitable[Response]]], ...] = (
    ("/v1/completions", create_completion),
    ("/v1/chat/completions", create_chat_completion),
    ("/v1/responses", create_response),
    ("/v1/embeddings", create_embeddings),
    ("/tokenize", tokenize),
    ("/detokenize", detokenize),
)


def build_http_app(context: ServerContext) -> Starlette:
    """Return the ASGI application of an engine. Endpoints of the API answer 503 until `context.attach` is
    called.
    """
    routes = [Route(path, endpoint, methods=["GET"]) for path, endpoint in _STATUS_ROUTES]
    routes += [Route(path, endpoint, methods=["POST"]) for path, endpoint in _API_ROUTES]
    app = Starlette(
        routes=routes,
        middleware=[
            *cors_middleware(context.settings),
            Middleware(RequestGate, settings=context.settings, counter=context.requests, metrics=context.metrics.http),
        ],
        exception_handlers=error_handlers(),
    )
    app.state.context = context
    return app


def cors_middleware(settings: ServerSettings) -> list[Middleware]:
    """Return the CORS middleware, which allows requests by pages of the configured origins; [] without origins."""
    if not settings.allowed_origins:
        return []
    return [
        Middleware(
            _PreflightAnswers,
            allow_origins=list(settings.allowed_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=_EXPOSED_HEADERS,
        )
    ]


class _PreflightAnswers(CORSMiddleware):
    """Starlette's CORS middleware, with answers to preflights in the form of the server's other answers.

    It answers preflights before `RequestGate` checks the API key, because browsers send them without a key.
    """

    def preflight_response(self, request_headers: Headers) -> Response:
        """Return the answer to a preflight."""
        response = super().preflight_response(request_headers)
        if response.status_code != 200:
            reason = bytes(response.body).decode()
            refused = ApiError(
                response.status_code,
                f"{reason}; allow the page's origin with --allowed-origin, and send only GET and POST",
                code="cors_refused",
            ).response()
            refused.headers.update(
                {name: value for name, value in response.headers.items() if name not in refused.headers}
            )
            response = refused
        response.headers["x-request-id"] = request_id_of(request_headers.get("x-request-id", ""))
        return response


def error_handlers() -> dict[Any, Callable[[Request, Exception], Awaitable[Response]]]:
    """Return the handlers of expected errors, by class, for an application of Starlette."""
    return {HTTPException: _answer_http_error, ApiError: _answer_known_error}


async def _answer_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    where = f"{request.method} {one_line(request.url.path, 200)}"
    if error.status_code == 404:
        return ApiError(404, f"there is no {where}", code="unknown_path").response()
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        response = ApiError(405, f"{where} is not possible; use {allowed}", code="method_not_allowed").response()
        response.headers["allow"] = allowed
        return response
    return ApiError(error.status_code, str(error.detail)).response()


async def _answer_known_error(request: Request, error: Exception) -> Response:
    return api_error_of(error, request.state.request_id).response()
