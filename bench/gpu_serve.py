"""Decode of one random Llama in bf16 on one GPU: windlass compared with transformers' continuous batching in one run.

    python bench/gpu_serve.py                                     # 8B shape, about 40 GiB
    python bench/gpu_serve.py --device cpu --hidden 64 --layers 2 --vocabulary 256 --requests 1,4 --answer 8

The second line is a functional test. The roof of a decode step is the time to read the weights and the KV cache once,
at the rate of a reduction over 2 GiB that is measured in the same run. Greedy tokens with and without graphs are
compared first.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from rig.clock import free

from windlass.cli.benches.bench_console import bench_console
from windlass.cli.benches.bench_results import write_result
from windlass.inference.llm import LLM
from windlass.inference.sampling_params import SamplingParams

_RESULTS = Path(__file__).parent / "results"
_HEAD_FEATURES, _GROUP = 128, 4


def main(
    device: Annotated[str, typer.Option(help="cuda, or cpu for a functional test.")] = "cuda",
    hidden: Annotated[int, typer.Option(help="Width.")] = 4096,
    layers: Annotated[int, typer.Option(help="Blocks.")] = 32,
    vocabulary: Annotated[int, typer.Option(help="Tokens.")] = 128256,
    prompt: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 128,
    answer: Annotated[int, typer.Option(help="Tokens of an answer.")] = 256,
    requests: Annotated[str, typer.Option(help="Numbers of requests at a time, with commas.")] = "1,8,64",
    rounds: Annotated[int, typer.Option(min=1, help="Turns that each contender takes.")] = 3,
    peers: Annotated[bool, typer.Option(help="Measure transformers.")] = True,
    name: Annotated[str, typer.Option(help="Name of the file in --results.")] = "gpu_serve",
    results: Annotated[Path, typer.Option(help="Folder of the JSON.")] = _RESULTS,
) -> None:
    """Measure decode rates alternately, print a table, and write the JSON; exit code 1 if tokens differ."""
    place, counts, console = torch.device(device), [int(one) for one in requests.split(",")], bench_console()
    read = _read_rate(place)
    with tempfile.TemporaryDirectory() as folder:
        config = _save_model(folder, hidden, layers, vocabulary)
        options: dict[str, Any] = {
            "max_sequences": max(counts),
            "max_tokens_per_step": max(512, max(counts)),
            "max_model_len": prompt + answer + 16,
            "kv_cache_tokens": (prompt + answer + 32) * max(counts),
            "skip_tokenizer_init": True,
            "prefix_caching": False,
        }
        llms = {
            label: LLM(folder, device=place, cuda_graphs=graphs, **options)
            for label, graphs in (("windlass", True), ("windlass, no graphs", False))
        }
        same = _same_tokens(list(llms.values()), prompt, vocabulary)
        rates: dict[str, dict[int, list[float]]] = {}
        peer = _load_peer(folder, place) if peers else None
        for _ in range(rounds):
            for count in counts:
                sizes = count, prompt, answer, vocabulary
                runs: dict[str, Callable[[], float]] = {
                    label: partial(_decode, llm, *sizes) for label, llm in llms.items()
                }
                if peer is not None:
                    runs["transformers continuous batching"] = partial(_continuous, peer, *sizes)
                for label, measure in runs.items():
                    rates.setdefault(label, {}).setdefault(count, []).append(measure())
        weights = sum(parameter.nbytes for parameter in llms["windlass"].engine.runner.model.parameters())
        for llm in llms.values():
            llm.close()
    free(place)
    kv = 2 * config.num_key_value_heads * _HEAD_FEATURES * layers * 2  # bytes of one token's keys and values
    roof = {count: count * read / (weights + count * kv * (prompt + answer / 2)) for count in counts}
    table = Table("requests", "roof tok/s", *rates)
    for count in counts:
        row = [statistics.median(found[count]) for found in rates.values()]
        table.add_row(str(count), f"{roof[count]:.0f}", *(f"{rate:.0f} ({rate / roof[count]:.0%})" for rate in row))
    console.print(table)
    console.print(f"read {read / 1e9:.0f} GB/s; weights {weights / 1e9:.2f} GB; greedy tokens equal: {same}")
    medians = {label: {n: statistics.median(one) for n, one in found.items()} for label, found in rates.items()}
    write_result(
        results / f"{name}.json",
        {"read": read, "weight_bytes": weights, "roof": roof, "rates": medians, "same_tokens": same},
    )
    if not same:
        raise typer.Exit(1)


def _save_model(folder: str, hidden: int, layers: int, vocabulary: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = max(hidden // _HEAD_FEATURES, _GROUP)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=hidden * 7 // 2,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // _GROUP,
        head_dim=_HEAD_FEATURES,
        max_position_embeddings=8192,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    return config


def _read_rate(device: torch.device) -> float:
    """Measure the rate of reading memory, bytes a second."""
    source = torch.ones((2 << 30) // 4 if device.type == "cuda" else 1 << 22, device=device)
    seconds = []
    for _ in range(12):
        _wait(device)
        began = time.perf_counter()
        source.sum()
        _wait(device)
        seconds.append(time.perf_counter() - began)
    return source.nbytes / statistics.median(seconds[2:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _prompts(count: int, length: int, vocabulary: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(count)
    found: list[list[int]] = torch.randint(3, vocabulary, (count, length), generator=generator).tolist()
    return found


def _same_tokens(llms: list[LLM], prompt: int, vocabulary: int) -> bool:
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    answers = [
        [one.outputs[0].token_ids for one in llm.generate(_prompts(4, prompt, vocabulary), params)] for llm in llms
    ]
    return all(answer == answers[0] for answer in answers)


def _decode(llm: LLM, count: int, prompt: int, answer: int, vocabulary: int) -> float:
    """Return the tokens a second that are generated once every request has its first token."""
    engine = llm.engine
    params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
    for number, ids in enumerate(_prompts(count, prompt, vocabulary)):
        engine.add_request(f"bench-{number}", ids, params, streams=True)
    tokens: dict[str, int] = {}
    began, before = 0.0, 0
    while engine.has_requests():
        for output in engine.step():
            tokens[output.request_id] = len(output.outputs[0].token_ids)
        if not began and len(tokens) == count:
            began, before = time.perf_counter(), sum(tokens.values())
    return (sum(tokens.values()) - before) / (time.perf_counter() - began)


def _load_peer(folder: str, device: torch.device) -> Any:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, trust_remote_code=False)
    return model.to(device).eval()


def _continuous(model: Any, count: int, prompt: int, answer: int, vocabulary: int) -> float:
    """Return the generated tokens a second of transformers' continuous batching, prompts included in the time."""
    from transformers import GenerationConfig

    generation = GenerationConfig(max_new_tokens=answer, do_sample=False, eos_token_id=-1, pad_token_id=0)
    began = time.perf_counter()
    found = model.generate_batch(
        inputs=_prompts(count, prompt, vocabulary), generation_config=generation, progress_bar=False
    )
    return sum(len(output.generated_tokens) for output in found.values()) / (time.perf_counter() - began)


if __name__ == "__main__":
    typer.run(main)
