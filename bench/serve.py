"""Throughput of a random Llama: windlass compared with transformers (one by one, continuous batching) and llama.cpp.

python bench/serve.py                                  # a few minutes, 4 GB
python bench/serve.py --llama-bin llama/bin            # needs the package gguf

All contenders run alternately in one run, which also measures the roofs: memory by a plain read loop on all threads,
arithmetic by a 2048^3 product, the better of MKL's and oneDNN's. The greedy tokens of windlass and transformers are
compared first. Servers get the same mixed load from the same clients over HTTP. Where a figure has a goal, it is
printed next to the figure.
"""

from __future__ import annotations

import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from gguf_model import quantize, require_programs, write_gguf
from http_load import Server, run_clients
from rich.table import Table

from windlass.cli.benches.bench_console import bench_console
from windlass.cli.benches.bench_results import write_result
from windlass.cli.benches.serving_models import write_tokenizer
from windlass.inference.llm import LLM
from windlass.inference.sampling_params import SamplingParams
from windlass.kernels.inference_path import get_inference_path
from windlass.kernels.kernel_dispatch import prefer_huge_pages

_RESULTS = Path(__file__).parent / "results"
_PROMPT, _ANSWER = 128, 24
_ROOF_BYTES, _ROOF_SIDE = 600 << 20, 2048
_HEAD = 8192 * 1024  # parameters of the head
_CACHE_TOKENS = 32_768
_MIXED_REQUESTS = 24
_KV_BYTES = 16 * 12 * 2 * 4 * 64 * 4  # bytes of a block: tokens, layers, keys and values, heads, features, fp32
_MIXED_CLIENTS = (8, 32)
_LONG_LOAD = 8  # requests of each client; the middle of the load is measured, while every client has a request
_LLAMA_FORMATS = {"fp32": "f32", "bf16": "bf16", "int8": "q8_0"}


@dataclass
class Measurement:
    """Rates of one contender in tokens per second, and the cores that other processes used, both for each round."""

    unit: str
    rates: list[float] = field(default_factory=list)
    other_cores: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.rates)


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Turns that each contender takes.")] = 3,
    weights: Annotated[str, typer.Option(help="Weight formats of windlass, with commas.")] = "fp32,bf16,int8",
    requests: Annotated[str, typer.Option(help="Numbers of requests at a time, with commas.")] = "1,8,32",
    layers: Annotated[int, typer.Option(help="Layers of the model; 12: 143.7M parameters.")] = 12,
    peers: Annotated[bool, typer.Option(help="Measure transformers.")] = True,
    servers: Annotated[bool, typer.Option(help="Measure servers over HTTP.")] = True,
    llama_bin: Annotated[str, typer.Option(help="Folder with llama.cpp's programs.")] = "",
    results: Annotated[Path, typer.Option(help="Folder of the JSON file.")] = _RESULTS,
    name: Annotated[str, typer.Option(help="Name of the JSON file.")] = "serve",
) -> None:
    """Measure all contenders alternately."""
    if llama_bin:
        require_programs(Path(llama_bin), "llama-quantize", "llama-batched-bench", *["llama-server"] * servers)
    console = bench_console()
    path = get_inference_path()
    counts = [int(count) for count in requests.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        model = _make_model(folder, layers)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        console.print(
            f"{parameters / 1e6:.1f}M parameters; kernels {path.name}, torch "
            f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
        )
        forms = weights.split(",")
        # inputs have the format of the weights, as in llama.cpp
        engines = {
            form: LLM(
                folder,
                skip_tokenizer_init=True,
                weights=form,
                activations=form if form in ("bf16", "int8") else "auto",
                kv_cache_tokens=_CACHE_TOKENS,
            )
            for form in forms
        }
        _compare_tokens(model, next(iter(engines.values())))
        runs: dict[str, tuple[str, Callable[[], float]]] = {}
        for form, llm in engines.items():
            for count in counts:
                runs[f"windlass {form}, {count}"] = ("decode", lambda llm=llm, count=count: _decode(llm, count))
            runs[f"windlass {form}, 512 tokens"] = ("prefill", lambda llm=llm: _prefill(llm))
            runs[f"windlass {form}, mixed"] = (
                "generated",
                lambda llm=llm: _mixed(llm, _mixed_load(), at_a_time=8),
            )
            runs[f"windlass {form}, mixed at once"] = ("generated", lambda llm=llm: _mixed(llm, _equal_answers()))
        if peers:
            runs["transformers generate, 1"] = ("generated", lambda: _generate(model))
        measured = {name: Measurement(unit) for name, (unit, _) in runs.items()}
        reads, flops, outside = [], [], []
        llama: dict[str, list[float]] = {}
        files = _llama_files(Path(folder), model, forms, Path(llama_bin)) if llama_bin else []
        for number in range(rounds + 1):
            read, product = _roofs()
            if number:  # the first round warms up
                reads.append(read)
                flops.append(product)
            for label in list(runs)[:: -1 if number % 2 else 1]:
                before = _cpu_seconds(), time.perf_counter()
                rate = runs[label][1]()
                if number:
                    measured[label].rates.append(rate)
                    measured[label].other_cores.append(_other_cores(*before))
            if number:
                outside.append(_outside_of_forward(next(iter(engines.values()))))
            for label, rate in _llama(Path(llama_bin), files, counts).items() if number else ():
                llama.setdefault(label, []).append(rate)
        if peers:
            label = "transformers continuous batching, mixed at once"
            measured[label] = Measurement("generated")
            before = _cpu_seconds(), time.perf_counter()
            measured[label].rates.append(_continuous(model))
            measured[label].other_cores.append(_other_cores(*before))
        for llm in engines.values():
            llm.close()
        runs.clear()  # its functions refer to the engines
        engines.clear()
        over_http = _measure_servers(Path(folder), Path(llama_bin) if llama_bin else None, files) if servers else {}
    read, product = statistics.median(reads), statistics.median(flops)
    nbytes = {"fp32": 4, "bf16": 2, "int8": 1}
    table = Table("contender", "measures", "tokens/s", "spread", "roof", "of roof", "other cores", box=None)
    roofs = {label: _roof(label, found.unit, parameters, nbytes, read, product) for label, found in measured.items()}
    for label, found in measured.items():
        table.add_row(
            label,
            found.unit,
            f"{found.median:.1f}",
            f"{min(found.rates):.1f}-{max(found.rates):.1f}",
            f"{roofs[label]:.0f}" if roofs[label] else "",
            f"{found.median / roofs[label]:.0%}" if roofs[label] else "",
            f"{statistics.median(found.other_cores):.2f}",
        )
    for label, speeds in llama.items():
        spread = f"{min(speeds):.1f}-{max(speeds):.1f}"
        table.add_row(f"llama.cpp {label}", "", f"{statistics.median(speeds):.1f}", spread, "", "", "")
    for label, served in over_http.items():
        generated = f"{served['generated_per_second']:.1f}"
        table.add_row(label, "generated", generated, "", "", "", f"{served['other']:.2f}")
    console.print(f"roofs: read {read / 1e9:.1f} GB/s, best 2048^3 product {product / 1e9:.0f} GFLOP/s")
    console.print(table)
    for label, served in over_http.items():
        times = [f"{key[:-3].replace('_', ' ')} {value:.0f} ms" for key, value in served.items() if "ms" in key]
        console.print(f"{label}: {', '.join(times)}", soft_wrap=True)
    rates = {label: found.median for label, found in measured.items()}
    rates |= {f"llama.cpp {label}": statistics.median(speeds) for label, speeds in llama.items()}
    rates |= {label: served["generated_per_second"] for label, served in over_http.items()}
    shares = {label: rates[label] / roof for label, roof in roofs.items() if roof}
    figures = _goals(rates, shares, statistics.median(outside), over_http)
    if "windlass fp32, mixed" in rates:
        # bound for every engine: all tokens of prompts and answers at the rate of the product
        load = _mixed_load()
        answers = sum(answer for _, answer in load)
        tokens = answers + sum(len(prompt) for prompt, _ in load)
        roof = answers / tokens * product / (2 * parameters)
        console.print(f"mixed load in fp32: at most {roof:.0f} generated tokens/s by arithmetic")
    goals = Table("figure", "measured", "goal", "", box=None)
    for figure, value, goal, is_most in figures:
        reached = value <= goal if is_most else value >= goal
        bound = f"{'<=' if is_most else '>='} {goal:.3g}"
        goals.add_row(figure, f"{value:.3g}", bound, "reached" if reached else "MISSED")
    console.print(goals)
    write_result(
        results / f"{name}.json",
        {
            "kernels": path.name,
            "read_gb_per_s": read / 1e9,
            "gemm_gflops": product / 1e9,
            "parameters": parameters,
            "tokens_per_second": {label: found.rates for label, found in measured.items()},
            "other_cores": {label: found.other_cores for label, found in measured.items()},
            "llama_cpp": llama,
            "over_http": over_http,
            "outside_of_forward": outside,
            "goals": [
                {"figure": figure, "measured": value, "goal": goal, "at_most": is_most}
                for figure, value, goal, is_most in figures
            ],
        },
    )


def _goals(
    rates: dict[str, float], shares: dict[str, float], outside: float, over_http: dict[str, dict[str, float]]
) -> list[tuple[str, float, float, bool]]:
    """Return figures with their goals, and True where the goal is an upper bound."""
    found: list[tuple[str, float, float, bool]] = []

    def ratio(name: str, ours: str, other: str, goal: float) -> None:
        if ours in rates and other in rates and rates[other]:
            found.append((name, rates[ours] / rates[other], goal, False))

    for name, label, goal in (
        ("fp32 decode, 1 request: part of the read roof", "windlass fp32, 1", 0.9),
        ("fp32 prefill: part of the GEMM roof", "windlass fp32, 512 tokens", 0.85),
    ):
        if label in shares:
            found.append((name, shares[label], goal, False))
    ratio("fp32 decode, 1 request: llama.cpp F32", "windlass fp32, 1", "llama.cpp f32 decode, 1", 1.4)
    for clients in _MIXED_CLIENTS:
        ours, other = f"windlass serve fp32, {clients} clients", f"llama-server f32, {clients} clients"
        ratio(f"fp32, {clients} clients: llama-server", ours, other, 1.5)
    at_once = "transformers continuous batching, mixed at once"
    ratio("fp32, mixed at once: continuous batching", "windlass fp32, mixed at once", at_once, 4.0)
    ratio("bf16 decode, 1 request: own fp32", "windlass bf16, 1", "windlass fp32, 1", 1.8)
    # If the dot product of bf16 pairs is not faster than fp32's, weights are widened, so that prefill gains nothing.
    goal = 1.7 if _bf16_gain() > 1.7 else 0.9
    ratio("bf16 prefill: own fp32", "windlass bf16, 512 tokens", "windlass fp32, 512 tokens", goal)
    for count, goal in ((1, 1.0), (8, 1.5), (32, 1.5)):
        other = f"llama.cpp q8_0 decode, {count}"
        ratio(f"int8 decode, {count} requests: Q8_0", f"windlass int8, {count}", other, goal)
    found.append(("fp32, 1 request: part of a step outside of the forward", outside, 0.05, True))
    for label, figures in over_http.items():
        if "overhead" in figures and "32 clients" in label:
            part = figures["overhead_full_load"]
            found.append((f"{label}: HTTP, scheduler, sampling, text, of a step", part, 0.03, True))
            found.append((f"{label}: MB beside weights and KV cache", figures["other_memory_mb"], 150, True))
    return found


def _make_model(folder: str, layers: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=8192,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    write_tokenizer(Path(folder))
    return model


def _prompt(length: int, seed: int) -> list[int]:
    r = random.Random(seed)
    return [r.randrange(3, 8192) for _ in range(length)]


def _greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)


def _compare_tokens(model: Any, llm: LLM) -> None:
    prompt = _prompt(40, 1)
    ours = llm.generate([prompt], _greedy(16))[0].outputs[0].token_ids
    with torch.no_grad():
        theirs = model.generate(torch.tensor([prompt]), max_new_tokens=16, min_new_tokens=16, do_sample=False)
    if ours != theirs[0, 40:].tolist():
        raise SystemExit(f"greedy tokens differ: {ours} and {theirs[0, 40:].tolist()}")


def _decode(llm: LLM, count: int) -> float:
    """Return the tokens a second of the median step in which every request gets one token."""
    engine = llm.engine
    for number in range(count):
        engine.add_request(f"decode-{number}", _prompt(_PROMPT, random.getrandbits(32)), _greedy(_ANSWER))
    seconds = []
    while engine.has_requests():
        before, began = engine.stats().step_tokens, time.perf_counter()
        engine.step()
        if engine.stats().step_tokens - before == count:
            seconds.append(time.perf_counter() - began)
    return count / statistics.median(seconds)


def _prefill(llm: LLM) -> float:
    """Return the best rate of three prompts, because the roof is that of the best of several products."""
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        llm.generate([_prompt(512, random.getrandbits(32))], _greedy(1))
        seconds.append(time.perf_counter() - began)
    return 512 / min(seconds)


def _mixed_load(count: int = _MIXED_REQUESTS) -> list[tuple[list[int], int]]:
    r = random.Random(5)
    return [(_prompt(r.randrange(16, 257), 100 + n), r.randrange(8, 65)) for n in range(count)]


def _equal_answers() -> list[tuple[list[int], int]]:
    """Return the mixed load with answers of their mean length, because transformers accepts one length for all
    requests."""
    load = _mixed_load()
    answer = sum(length for _, length in load) // len(load)
    return [(prompt, answer) for prompt, _ in load]


def _mixed(llm: LLM, load: list[tuple[list[int], int]], at_a_time: int = _MIXED_REQUESTS) -> float:
    """Return the generated tokens per second of a load of prompts and answer lengths, `at_a_time` requests at once."""
    llm.reset_prefix_cache()
    engine = llm.engine
    began, added, generated = time.perf_counter(), 0, 0
    while added < len(load) or engine.has_requests():
        stats = engine.stats()
        while added < len(load) and stats.num_running + stats.num_waiting < at_a_time:
            prompt, answer = load[added]
            engine.add_request(f"mixed-{added}", prompt, _greedy(answer))
            added += 1
            stats = engine.stats()
        generated += sum(len(output.outputs[0].token_ids) for output in engine.step())
    return generated / (time.perf_counter() - began)


def _generate(model: Any) -> float:
    ids = torch.tensor([_prompt(_PROMPT, 3)])
    began = time.perf_counter()
    with torch.no_grad():
        model.generate(ids, max_new_tokens=_ANSWER, min_new_tokens=_ANSWER, do_sample=False)
    return _ANSWER / (time.perf_counter() - began)


def _continuous(model: Any) -> float:
    """Return the generated tokens per second of transformers' own continuous batching, all requests at once."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    load = _equal_answers()
    settings = ContinuousBatchingConfig(num_blocks=512, max_batch_tokens=512)
    generation = GenerationConfig(max_new_tokens=load[0][1], do_sample=False, eos_token_id=-1, pad_token_id=0)
    began = time.perf_counter()
    found = model.generate_batch(
        inputs=[prompt for prompt, _ in load],
        generation_config=generation,
        continuous_batching_config=settings,
        progress_bar=False,
    )
    seconds = time.perf_counter() - began
    return sum(len(output.generated_tokens) for output in found.values()) / seconds


def _outside_of_forward(llm: LLM) -> float:
    """Return the part of decode steps of one request that is not spent in the model."""
    engine = llm.engine
    engine.add_request("outside", _prompt(_PROMPT, random.getrandbits(32)), _greedy(4 * _ANSWER))
    engine.step()
    before, began = engine.stats(), time.perf_counter()
    while engine.has_requests():
        engine.step()
    return 1 - (engine.stats().forward_seconds - before.forward_seconds) / (time.perf_counter() - began)


def _llama_files(folder: Path, model: Any, forms: Sequence[str], tools: Path) -> list[Path]:
    """Return the model as files of llama.cpp in the formats that equal those of windlass."""
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    base = write_gguf(folder, model.config, weights)
    return [quantize(base, _LLAMA_FORMATS[form], tools) for form in forms]


def _llama(folder: Path, files: Sequence[Path], counts: list[int]) -> dict[str, float]:
    """Return llama.cpp's tokens per second, by file and number of requests."""
    found = {}
    for file in files:
        command = [
            *(str(folder / "llama-batched-bench"), "-m", str(file), "-t", str(torch.get_num_threads())),
            *("-c", "16384", "-npp", str(_PROMPT), "-ntg", str(_ANSWER), "-npl", ",".join(map(str, counts))),
            *("--output-format", "jsonl"),
        ]
        if file.stem == "f32":
            command += ["-ctk", "f32", "-ctv", "f32"]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        for line in output.splitlines():
            if line.startswith("{"):
                row = json.loads(line)
                found[f"{file.stem} decode, {row['pl']}"] = float(row["speed_tg"])
                found[f"{file.stem} prefill, {row['pl']}"] = float(row["speed_pp"])
    return found


def _measure_servers(folder: Path, tools: Path | None, files: Sequence[Path]) -> dict[str, dict[str, float]]:
    """Return figures of the mixed load over HTTP, by server and number of clients."""
    threads = str(torch.get_num_threads())
    found = {}
    for clients in _MIXED_CLIENTS:
        load = _mixed_load(max(24, 2 * clients))
        command = [sys.executable, "-m", "windlass", "serve", str(folder), "--port", "{port}"]
        command += ["--served-model-name", "windlass", "--no-prefix-caching", "--kv-cache-tokens", str(_CACHE_TOKENS)]
        label = f"windlass serve fp32, {clients} clients"
        found[label] = _measure_server(command, "windlass", load, clients, folder)
        for file in files[:1] if tools else ():
            command = [str((tools or Path()) / "llama-server"), "-m", str(file), "--host", "127.0.0.1", "--port"]
            command += ["{port}", "-t", threads, "-tb", threads, "-np", str(clients), "-c", str(512 * clients)]
            command += ["-ub", "512", "-ctk", "f32", "-ctv", "f32"]
            label = f"llama-server {file.stem}, {clients} clients"
            found[label] = _measure_server(command, "llama", load, clients, folder)
    return found


def _measure_libraries() -> int:
    """Return the resident bytes of a process that has imported torch and a model class of transformers."""
    code = "import torch; from transformers import LlamaForCausalLM; print(open('/proc/self/statm').read().split()[1])"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    return int(printed) * resource.getpagesize()


def _measure_server(
    command: list[str], model: str, load: list[tuple[list[int], int]], clients: int, folder: Path
) -> dict[str, float]:
    server = Server(command, folder / "server.log")
    try:
        run_clients(server.port, model, load[:2], 2)
        before = server.metrics() if model == "windlass" else {}
        began = _cpu_seconds(), time.perf_counter()
        found = run_clients(server.port, model, load, clients)
        found["other"] = _other_cores(*began)  # includes the cores of the server, which is another process
        if before:
            after, seconds = server.metrics(), time.perf_counter() - began[1]
            found["overhead"] = _outside(before, after, seconds)
            found["resident_mb"] = server.resident()["VmRSS"] / 1e6
            weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
            cache = after["windlass:kv_blocks"] * _KV_BYTES
            found["other_memory_mb"] = (server.resident()["VmRSS"] - weights - cache) / 1e6
            found["libraries_mb"] = _measure_libraries() / 1e6
            if clients == max(_MIXED_CLIENTS):
                readings: list[tuple[dict[str, float], float]] = []

                def read() -> None:
                    readings.append((server.metrics(), time.perf_counter()))

                run_clients(server.port, model, _mixed_load(_LONG_LOAD * clients), clients, at_full_load=read)
                (before, start), (after, end) = readings
                found["overhead_full_load"] = _outside(before, after, end - start)
    finally:
        server.stop()
    return found


def _outside(before: dict[str, float], after: dict[str, float], seconds: float) -> float:
    """Return the part of the time with requests, between two readings of a server's metrics, that was not spent in
    forwards.
    """
    names = "windlass:forward_seconds_total", "windlass:idle_seconds_total"
    forward, idle = (after[name] - before[name] for name in names)
    return 1 - forward / (seconds - idle)


def _roofs() -> tuple[float, float]:
    """Return bytes per second of a read loop and floating-point operations a second of a product."""
    path = get_inference_path()
    memory = torch.empty(_ROOF_BYTES, dtype=torch.uint8)
    prefer_huge_pages(memory)  # packed weights use huge pages too
    memory.fill_(1)
    reads = []
    for _ in range(3):
        if path.module is not None:
            began = time.perf_counter()
            path.module.read_memory(path.number, memory.data_ptr(), _ROOF_BYTES, torch.get_num_threads())
            reads.append(time.perf_counter() - began)
    read = _ROOF_BYTES / min(reads) if reads else 0.0
    return read, 2 * _ROOF_SIDE**3 / min(_product_seconds(torch.float32))


def _product_seconds(dtype: torch.dtype) -> list[float]:
    """Return times of square products by MKL (in fp32) and by oneDNN with a packed weight, which is faster on some
    CPUs."""
    square, seconds = torch.randn(_ROOF_SIDE, _ROOF_SIDE).to(dtype), []
    packed = torch.ops.mkldnn._reorder_linear_weight(square) if torch.backends.mkldnn.is_available() else None
    for _ in range(4):
        began = time.perf_counter()
        square @ square
        seconds.append(time.perf_counter() - began)
        if packed is not None:
            began = time.perf_counter()
            torch.ops.mkldnn._linear_pointwise(square, packed, None, "none", [], "")
            seconds.append(time.perf_counter() - began)
    return seconds


def _bf16_gain() -> float:
    """Return the rate of the best bf16 product over that of the best fp32 product; 0 without bf16 instructions."""
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return 0.0  # oneDNN refuses bf16, and MKL needs minutes for the product
    return min(_product_seconds(torch.float32)) / min(_product_seconds(torch.bfloat16))


def _roof(label: str, unit: str, parameters: int, nbytes: dict[str, int], read: float, product: float) -> float:
    """Return the upper bound of tokens per second by memory and fp32 arithmetic; 0 for rows without a bound."""
    form = label.split()[1].rstrip(",")
    if form not in nbytes or unit == "generated":
        return 0.0
    if unit == "prefill":
        return product / (2 * (parameters - _HEAD)) if form == "fp32" else 0.0  # the head computes one row
    count = int(label.rsplit(",", 1)[1])
    seconds = parameters * nbytes[form] / read if read else 0.0
    if form == "fp32":
        seconds = max(seconds, 2 * parameters * count / product)
    return count / seconds if seconds else 0.0


def _cpu_seconds() -> float:
    """Return the CPU seconds of all other processes since the machine started."""
    fields = [int(value) for value in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK") - sum(os.times()[:2])


def _other_cores(seconds: float, since: float) -> float:
    return max(0.0, (_cpu_seconds() - seconds) / (time.perf_counter() - since))


if __name__ == "__main__":
    typer.run(main)
