"""Command `windlass serve`: an HTTP server with OpenAI's interface."""

from __future__ import annotations

import codecs
import ipaddress
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from windlass.base.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from windlass.serving.server_settings import ApiKeys

_MAX_TEMPLATE_BYTES = 2**20


def serve(
    model: Annotated[str, typer.Argument(help="Hugging Face directory or name, or OUT of `windlass train`.")],
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0: all of this machine.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any free one.")] = 8000,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="Name of the model in requests; repeatable. [that of the directory]")
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="File with one API key a line. Without it, every request is answered.")
    ] = None,
    allowed_origin: Annotated[
        list[str] | None, typer.Option(help="Origin of web pages that may send requests; repeatable. [none]")
    ] = None,
    replicas: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=256,
            help="Processes with a copy of the model, which are started again if they end. [the model is in this "
            "process; 1 with --tp, --pp or --ep]",
        ),
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help="Ranks over which matrices are sharded.")] = 1,
    pp: Annotated[int, typer.Option(min=1, help="Ranks over which layers are distributed.")] = 1,
    ep: Annotated[int, typer.Option(min=1, help="Ranks over which experts are distributed.")] = 1,
    dtype: Annotated[str, typer.Option(help="Weights: auto (as in the files), fp32, bf16 or fp16.")] = "auto",
    kv_dtype: Annotated[str, typer.Option(help="KV cache: auto (as the weights), fp32, bf16 or int8.")] = "auto",
    kv_cache_tokens: Annotated[
        int | None, typer.Option(help="Tokens in the KV cache. [a part of the free memory]")
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Tokens of a prompt and its answer together. [the model's]")
    ] = None,
    max_tokens_per_step: Annotated[int, typer.Option(help="Tokens of one forward.")] = 512,
    max_sequences: Annotated[
        int | None,
        typer.Option(help="Sequences that run at the same time. [64; with --weights-tier disk by measured times]"),
    ] = None,
    max_queued: Annotated[int, typer.Option(help="Waiting requests, beyond which new ones get 429.")] = 1024,
    policy: Annotated[str, typer.Option(help="Scheduling: splitfuse, prefill-first or orca.")] = "splitfuse",
    max_gap_ms: Annotated[
        float | None, typer.Option(help="Largest predicted gap in ms between two tokens of a running answer.")
    ] = None,
    max_wait_seconds: Annotated[
        float, typer.Option(help="A request that would wait longer for its first token runs before all others.")
    ] = 30.0,
    enforce_max_wait: Annotated[
        bool,
        typer.Option("--enforce-max-wait", help="Refuse requests (429) that would exceed --max-wait-seconds."),
    ] = False,
    prefix_caching: Annotated[
        bool, typer.Option("--prefix-caching/--no-prefix-caching", help="Share keys and values of equal prefixes.")
    ] = True,
    swap_bytes: Annotated[int, typer.Option(help="Host memory for the KV blocks of preempted sequences.")] = 0,
    swap_directory: Annotated[
        Path | None, typer.Option(help="Directory for the KV blocks that do not fit into --swap-bytes.")
    ] = None,
    weights: Annotated[
        str | None, typer.Option(help="Format of packed weights: fp32, bf16, int8, int4_g128, ... [as they are]")
    ] = None,
    activations: Annotated[
        str, typer.Option(help="Inputs of packed layers: float, bf16, int8, or auto (int8 for weights below 8 bits).")
    ] = "auto",
    weights_tier: Annotated[
        str,
        typer.Option(
            help="device: weights in memory; disk: read ahead of each layer, for models larger than memory; host: "
            "mapped from the same file, whose pages all replicas share."
        ),
    ] = "device",
    weights_directory: Annotated[
        Path | None, typer.Option(help="Directory of the weight file. [windlass-weights in the model's directory]")
    ] = None,
    weights_buffer_bytes: Annotated[
        int | None, typer.Option(help="Memory through which tier disk reads weights. [three of the largest products]")
    ] = None,
    deterministic: Annotated[
        bool | None,
        typer.Option("--deterministic/--no-deterministic", help="Same bits in any batch. [on with packed weights]"),
    ] = None,
    lora: Annotated[list[str] | None, typer.Option(help="Adapter as NAME=DIRECTORY; repeatable.")] = None,
    speculative: Annotated[
        str | None, typer.Option(help="'ngram' (prompt lookup), or the directory of a draft model.")
    ] = None,
    speculative_tokens: Annotated[int, typer.Option(help="Drafts for each sequence and step.")] = 4,
    cuda_graphs: Annotated[
        bool, typer.Option("--cuda-graphs/--no-cuda-graphs", help="Record decode steps on a GPU, and replay them.")
    ] = True,
    gpu_memory_utilization: Annotated[float, typer.Option(help="Part of a GPU's memory for weights and cache.")] = 0.9,
    seed: Annotated[int | None, typer.Option(help="Seed of requests without one. [random]")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="Directory of the tokenizer. [that of the model]")] = None,
    chat_template: Annotated[
        Path | None, typer.Option(help="File with a chat template. [that of the tokenizer]")
    ] = None,
    tool_calls: Annotated[
        str, typer.Option(help="Form of the model's tool calls: auto, hermes, llama3_json or none.")
    ] = "auto",
    max_output_tokens: Annotated[int | None, typer.Option(help="Tokens of one answer. [no limit]")] = None,
    max_prompts: Annotated[int, typer.Option(help="Prompts of one request.")] = 256,
    max_body_bytes: Annotated[int, typer.Option(help="Bytes of one request.")] = 16 * 2**20,
    drain_timeout: Annotated[
        float, typer.Option(help="Seconds that running requests get after the first SIGTERM or Ctrl-C.")
    ] = 30.0,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python files that come with the model.")
    ] = False,
) -> None:
    """Serve MODEL over HTTP. SIGTERM or Ctrl-C ends the server after the running requests; a second signal at once."""
    from windlass.cli.training.run_folder import export_directory_of
    from windlass.serving.engine_loading import EngineSource
    from windlass.serving.engine_ranks import needs_ranks
    from windlass.serving.engine_server import serve_engine
    from windlass.serving.http_server import bind_socket
    from windlass.serving.replicas.replica_server import serve_replicas
    from windlass.serving.server_settings import ServerSettings

    directory = str(export_directory_of(Path(model))) if Path(model).is_dir() else model
    settings = ServerSettings(
        model_names=tuple(served_model_name or [default_model_name(model)]),
        max_body_bytes=max_body_bytes,
        max_prompts=max_prompts,
        max_output_tokens=max_output_tokens,
        drain_timeout=drain_timeout,
        tool_calls=tool_calls,
        chat_template=None if chat_template is None else _read_template(chat_template),
        allowed_origins=tuple(allowed_origin or ()),
        api_keys=_read_keys(api_key_file),
    )
    options: dict[str, Any] = {
        "dtype": dtype,
        "trust_remote_code": trust_remote_code,
        "tokenizer": None if tokenizer is None else str(tokenizer),
        "tp": tp,
        "pp": pp,
        "ep": ep,
        "kv_dtype": kv_dtype,
        "kv_cache_tokens": kv_cache_tokens,
        "host_engines": replicas or 1,
        "max_model_len": max_model_len,
        "max_tokens_per_step": max_tokens_per_step,
        "max_queued": max_queued,
        "policy": policy,
        "max_gap_ms": max_gap_ms,
        "max_wait_seconds": max_wait_seconds,
        "enforce_max_wait": enforce_max_wait,
        "prefix_caching": prefix_caching,
        "swap_bytes": swap_bytes,
        "swap_directory": None if swap_directory is None else str(swap_directory),
        "weights": weights,
        "activations": activations,
        "weights_tier": weights_tier,
        "weights_directory": None if weights_directory is None else str(weights_directory),
        "weights_buffer_bytes": weights_buffer_bytes,
        "deterministic": deterministic,
        "lora": parse_adapters(lora or [], settings.model_names),
        "speculative": _speculative_options(speculative, speculative_tokens),
        "cuda_graphs": cuda_graphs,
        "gpu_memory_utilization": gpu_memory_utilization,
        "seed": seed,
    }
    if max_sequences is not None:
        options["max_sequences"] = max_sequences
    source = EngineSource(directory, options)
    if replicas is None and needs_ranks(source, os.environ):
        replicas = 1  # if one rank of a model ends, all must be started again, which only another process can do
    if replicas is None:
        # replicas check their options themselves, so that the router needs no torch
        check_engine_options(directory, options)
    listener = bind_socket(host, port)
    address = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
    if settings.api_keys is None and not _is_loopback(host):
        print(f"windlass: {address} answers every request; give --api-key-file to require a key", file=sys.stderr)
    print(f"windlass: loading {model}; listening on {address}", file=sys.stderr, flush=True)

    def report_ready() -> None:
        name = settings.model_names[0]
        print(f"windlass: serving {name} on {address} (OpenAI clients: {address}/v1)", file=sys.stderr, flush=True)

    if replicas is not None:
        code = serve_replicas(source, settings, replicas, listener, report_ready)
    else:
        code = serve_engine(source, settings, listener, report_ready)
    if code:
        raise typer.Exit(code)


def default_model_name(model: str) -> str:
    """Return the last part of a directory's path, or the full name of a model on the hub."""
    return Path(model).resolve().name if Path(model).is_dir() else model


def check_engine_options(directory: str, options: dict[str, Any]) -> None:
    """Check the model's directory and the options of its engine, before any process loads the model.

    Raises:
        ConfigError, ModelError: an option is out of range, or there is no model.
    """
    from windlass.inference.engine_options import EngineOptions
    from windlass.inference.model_loading import parse_dtype

    names = ("dtype", "trust_remote_code", "tokenizer")
    EngineOptions.from_arguments(**{name: value for name, value in options.items() if name not in names})
    parse_dtype(options["dtype"])
    if Path(directory).is_dir() and not (Path(directory) / "config.json").is_file():
        raise ModelError(
            f"{directory} is not a model: it has no config.json; give a directory that save_pretrained wrote"
        )


def parse_adapters(entries: list[str], model_names: tuple[str, ...]) -> dict[str, str] | None:
    """Return the directories of adapters by name; None without any.

    Raises:
        ConfigError: an entry is not NAME=DIRECTORY, a name is used twice, or a directory contains no adapter.
    """
    found: dict[str, str] = {}
    for entry in entries:
        name, _, directory = entry.partition("=")
        if not name or not directory:
            raise ConfigError(f"--lora is {entry!r}; write NAME=DIRECTORY")
        if name in found or name in model_names:
            raise ConfigError(f"--lora {entry!r}: the name {name!r} is used twice; choose another")
        if not (Path(directory) / "adapter_config.json").is_file():
            raise ConfigError(
                f"--lora {entry!r}: {directory} has no adapter_config.json; give a directory that peft's "
                "save_pretrained wrote"
            )
        found[name] = directory
    return found or None


def _speculative_options(method: str | None, tokens: int) -> dict[str, Any] | None:
    if method is None:
        return None
    if method == "ngram":
        return {"method": "ngram", "num_tokens": tokens}
    return {"method": "draft", "num_tokens": tokens, "model": method}


def _read_keys(path: Path | None) -> ApiKeys | None:
    from windlass.serving.server_settings import ApiKeys

    return None if path is None else ApiKeys.from_file(path)


def _read_template(path: Path) -> str:
    from jinja2 import TemplateSyntaxError

    from windlass.base.bounded_input import read_bounded
    from windlass.inference.chat_template import parse_template

    data = read_bounded(path, _MAX_TEMPLATE_BYTES)
    if data is None:
        raise ConfigError(f"--chat-template {path} is larger than {_MAX_TEMPLATE_BYTES:,} bytes; give a smaller file")
    try:
        template = data.removeprefix(codecs.BOM_UTF8).decode()
        parse_template(template)
    except TemplateSyntaxError as error:
        raise ConfigError(
            f"--chat-template {path} is not Jinja at line {error.lineno}: {error.message}; correct the template"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--chat-template {path} is not UTF-8 at byte {error.start}; save it as UTF-8") from error
    return template


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
