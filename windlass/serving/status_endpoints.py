"""Endpoints about the server: models, health, readiness, version, metrics, and the page for a browser."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response

import windlass
from windlass.serving.api_errors import ApiError, json_response
from windlass.serving.request_counter import ServerPhase
from windlass.serving.server_context import ServerContext
from windlass.serving.server_metrics import CONTENT_TYPE


async def list_models(request: Request) -> Response:
    """Return the served models and adapters."""
    context: ServerContext = request.app.state.context
    return json_response({"object": "list", "data": _models(context)})


async def show_model(request: Request) -> Response:
    """Return the model or adapter that the path names."""
    context: ServerContext = request.app.state.context
    name = request.path_params["model"]
    context.lora_of(name)
    return json_response(next(entry for entry in _models(context) if entry["id"] == name))


def _models(context: ServerContext) -> list[dict[str, object]]:
    base = context.settings.model_names[0]
    common = {"object": "model", "created": context.created, "owned_by": "windlass"}
    length = context.engine.max_model_len
    models = [
        {"id": name, **common, "root": base, "parent": None, "max_model_len": length}
        for name in context.settings.model_names
    ]
    adapters = [
        {"id": name, **common, "root": name, "parent": base, "max_model_len": length}
        for name in context.engine.lora_names
    ]
    return [*models, *adapters]


async def show_health(request: Request) -> Response:
    """Return 200 while the process works, also while it loads the model or drains; 503 after the engine failed."""
    context: ServerContext = request.app.state.context
    engine = context.loaded_engine
    failed = context.requests.phase is ServerPhase.FAILED or (engine is not None and not engine.is_healthy)
    phase = ServerPhase.FAILED if failed else context.requests.phase
    return json_response({"status": phase.value}, 503 if failed else 200)


async def show_readiness(request: Request) -> Response:
    """Return 200 if new requests are accepted, else 503 with the reason."""
    context: ServerContext = request.app.state.context
    try:
        context.requests.refuse_unless_ready()
    except ApiError as error:
        return error.response()
    return json_response({"status": context.requests.phase.value})


async def show_version(request: Request) -> Response:
    """Return the version of windlass."""
    return json_response({"version": windlass.__version__})


async def show_metrics(request: Request) -> Response:
    """Return the metrics in Prometheus' text format."""
    context: ServerContext = request.app.state.context
    return Response(context.metrics.exposition(), media_type=CONTENT_TYPE)


async def show_page(request: Request) -> Response:
    """Return the page for a browser, with a content security policy that allows only the page's own script and style,
    and requests to this server.
    """
    page, policy = _page()
    return Response(page, media_type="text/html; charset=utf-8", headers={"content-security-policy": policy})


@cache
def _page() -> tuple[bytes, str]:
    page = resources.files("windlass.serving").joinpath("page.html").read_text("utf-8")
    hashes = {
        tag: base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        for tag, body in re.findall(r"<(script|style)>(.*?)</\1>", page, re.S)
    }
    policy = (
        f"default-src 'none'; connect-src 'self'; img-src data:; script-src 'sha256-{hashes['script']}'; "
        f"style-src 'sha256-{hashes['style']}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return page.encode(), policy
