"""Throughput of a random Llama: windlass compared with transformers (one by one, continuous batching) and llama.cpp.

python bench/serve.py                                  # a few minutes, 4 GB
python bench/serve.py --llama-bin llama/bin --gguf model-f32.gguf,model-q8_0.gguf

All contenders run alternately in one run. The roofs are measured in it too: memory by a plain read loop on all threads,
arithmetic by MKL's 2048^3 product. The greedy tokens of windlass and transformers are compared first.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from windlass.cli.benches.bench_console import bench_console
from windlass.cli.benches.bench_results import write_result
from windlass.inference.llm import LLM
from windlass.inference.sampling_params import SamplingParams
from windlass.kernels.inference_path import get_inference_path
from windlass.kernels.kernel_dispatch import prefer_huge_pages

_RESULTS = Path(__file__).parent / "results"
_PROMPT, _ANSWER = 128, 24
_ROOF_BYTES, _ROOF_SIDE = 600 << 20, 2048
_HEAD = 8192 * 1024  # parameters of the head


@dataclass
class Measurement:
    """Rates of one contender in tokens per second, one per round, and the CPU share of other processes."""

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
    llama_bin: Annotated[str, typer.Option(help="Folder with llama-batched-bench.")] = "",
    gguf: Annotated[str, typer.Option(help="GGUF files for it, with commas.")] = "",
    results: Annotated[Path, typer.Option(help="Folder of the JSON file.")] = _RESULTS,
    name: Annotated[str, typer.Option(help="Name of the JSON file.")] = "serve",
) -> None:
    """Measure all contenders in turns."""
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
        engines = {
            form: LLM(folder, weights=form, skip_tokenizer_init=True, kv_cache_tokens=32_768)
            for form in weights.split(",")
        }
        _compare_tokens(model, next(iter(engines.values())))
        runs: dict[str, tuple[str, Callable[[], float]]] = {}
        for form, llm in engines.items():
            for count in counts:
                runs[f"windlass {form}, {count}"] = ("decode", lambda llm=llm, count=count: _decode(llm, count))
            runs[f"windlass {form}, 512 tokens"] = ("prefill", lambda llm=llm: _prefill(llm))
            runs[f"windlass {form}, mixed"] = ("generated", lambda llm=llm: _mixed(llm))
        if peers:
            runs["transformers generate, 1"] = ("generated", lambda: _generate(model))
            runs["transformers continuous batching, mixed"] = ("generated", lambda: _continuous(model))
        measured = {name: Measurement(unit) for name, (unit, _) in runs.items()}
        reads, flops = [], []
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
        for llm in engines.values():
            llm.close()
    read, product = statistics.median(reads), statistics.median(flops)
    nbytes = {"fp32": 4, "bf16": 2, "int8": 1}
    table = Table("contender", "measures", "tokens/s", "spread", "roof", "of roof", "other cores", box=None)
    for label, found in measured.items():
        roof = _roof(label, found.unit, parameters, nbytes, read, product)
        table.add_row(
            label,
            found.unit,
            f"{found.median:.1f}",
            f"{min(found.rates):.1f}-{max(found.rates):.1f}",
            f"{roof:.0f}" if roof else "",
            f"{found.median / roof:.0%}" if roof else "",
            f"{statistics.median(found.other_cores):.2f}",
        )
    console.print(f"roofs: read {read / 1e9:.1f} GB/s, MKL 2048^3 {product / 1e9:.0f} GFLOP/s")
    console.print(table)
    llama = _llama(Path(llama_bin), gguf, counts) if llama_bin else {}
    for label, rate in llama.items():
        console.print(f"llama.cpp {label}: {rate:.1f} tokens/s")
    write_result(
        results / f"{name}.json",
        {
            "kernels": path.name,
            "read_gb_per_s": read / 1e9,
            "gemm_gflops": product / 1e9,
            "tokens_per_second": {label: found.rates for label, found in measured.items()},
            "other_cores": {label: found.other_cores for label, found in measured.items()},
            "llama_cpp": llama,
        },
    )


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
    """Return the rate of steps in which every request gets one token."""
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
    began = time.perf_counter()
    llm.generate([_prompt(512, random.getrandbits(32))], _greedy(1))
    return 512 / (time.perf_counter() - began)


def _mixed_load() -> list[tuple[list[int], int]]:
    r = random.Random(5)
    return [(_prompt(r.randrange(16, 257), 100 + n), r.randrange(8, 65)) for n in range(24)]


def _mixed(llm: LLM) -> float:
    """Return the generated tokens a second of 24 requests, 8 at a time."""
    llm.reset_prefix_cache()
    load, engine = _mixed_load(), llm.engine
    began, added, generated = time.perf_counter(), 0, 0
    while added < len(load) or engine.has_requests():
        stats = engine.stats()
        while added < len(load) and stats.num_running + stats.num_waiting < 8:
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
    """Return the generated tokens a second of transformers' own continuous batching, all requests at once."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    load = _mixed_load()
    settings = ContinuousBatchingConfig(num_blocks=512, max_batch_tokens=512)
    # it accepts one length for all requests: the mean of the load
    answer = sum(length for _, length in load) // len(load)
    generation = GenerationConfig(max_new_tokens=answer, do_sample=False, eos_token_id=-1, pad_token_id=0)
    began = time.perf_counter()
    found = model.generate_batch(
        inputs=[prompt for prompt, _ in load],
        generation_config=generation,
        continuous_batching_config=settings,
        progress_bar=False,
    )
    seconds = time.perf_counter() - began
    return sum(len(output.generated_tokens) for output in found.values()) / seconds


def _llama(folder: Path, files: str, counts: list[int]) -> dict[str, float]:
    """Return llama.cpp's tokens per second, by file and number of requests."""
    found = {}
    for file in files.split(","):
        command = [
            *(str(folder / "llama-batched-bench"), "-m", file, "-t", str(torch.get_num_threads())),
            *("-c", "16384", "-npp", str(_PROMPT), "-ntg", str(_ANSWER), "-npl", ",".join(map(str, counts))),
            *("--output-format", "jsonl"),
        ]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        for line in output.splitlines():
            if line.startswith("{"):
                row = json.loads(line)
                found[f"{Path(file).name} decode, {row['pl']}"] = float(row["speed_tg"])
                found[f"{Path(file).name} prefill, {row['pl']}"] = float(row["speed_pp"])
    return found


def _roofs() -> tuple[float, float]:
    """Return bytes a second of a read loop and floating-point operations a second of a product."""
    path = get_inference_path()
    memory = torch.empty(_ROOF_BYTES, dtype=torch.uint8)
    prefer_huge_pages(memory)  # packed weights use huge pages too
    memory.fill_(1)
    square = torch.randn(_ROOF_SIDE, _ROOF_SIDE)
    reads, products = [], []
    for _ in range(3):
        if path.module is not None:
            began = time.perf_counter()
            path.module.read_memory(path.number, memory.data_ptr(), _ROOF_BYTES, torch.get_num_threads())
            reads.append(time.perf_counter() - began)
        began = time.perf_counter()
        square @ square
        products.append(time.perf_counter() - began)
    read = _ROOF_BYTES / min(reads) if reads else 0.0
    return read, 2 * _ROOF_SIDE**3 / min(products)


def _roof(label: str, unit: str, parameters: int, nbytes: dict[str, int], read: float, product: float) -> float:
    """Return the upper bound of tokens per second by memory and fp32 arithmetic; 0 if none is stated."""
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
