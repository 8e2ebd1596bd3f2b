"""Decode rate and memory of one request to a random Llama: windlass with packed weights, and llama.cpp with the same
model as GGUF.

python bench/compressed_serve.py --llama-bin llama/bin    # needs the package gguf
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from gguf_model import require_programs
from rich.table import Table

from windlass.cli.benches.bench_console import bench_console
from windlass.cli.benches.bench_results import write_result
from windlass.cli.model_run import measure_run
from windlass.compress.gguf_file import write_gguf
from windlass.compress.packed_directory import write_packed_directory
from windlass.inference.llm import LLM
from windlass.inference.sampling_params import SamplingParams

_RESULTS = Path(__file__).parent / "results" / "compressed_serve.json"
_PROMPT, _ANSWER = 16, 48
_TRIES = 5
# weight format of windlass -> goal: least ratio of windlass's rate to llama.cpp's
_FORMATS = {"int8_g32": 1.0, "int4_g32": 1.0, "ternary": 1.2, "binary_g128": 1.2}


def main(
    llama_bin: Annotated[Path | None, typer.Option(help="Folder with llama.cpp's programs.")] = None,
    formats: Annotated[str, typer.Option(help="Formats, separated by commas.")] = ",".join(_FORMATS),
    layers: Annotated[int, typer.Option(min=1)] = 12,
    hidden: Annotated[int, typer.Option(help="Features of a token.")] = 768,
    rounds: Annotated[int, typer.Option(min=1, help="Turns that each contender takes.")] = 3,
    work: Annotated[Path | None, typer.Option(help="Folder of the models, which are kept there.")] = None,
    results: Annotated[Path, typer.Option(help="The JSON file.")] = _RESULTS,
) -> None:
    """Measure every format in turn, print the table, and write the JSON."""
    if llama_bin is not None:
        require_programs(llama_bin, "llama-batched-bench")
    folder = work or Path(tempfile.mkdtemp())
    try:
        rows = _measure(folder, formats.split(","), layers, hidden, rounds, llama_bin)
    finally:
        if work is None:
            shutil.rmtree(folder)
    table = Table(title="Generated tokens/s of one request, and peak memory")
    columns = ("format", "file, MB", "windlass", "times fp32", "MB", "llama.cpp", "ratio", "goal", "its MB")
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        peer = row.get("llama")
        cells = (f"{peer:.1f}", f"{row['windlass'] / peer:.2f}", f"{row['goal']:.1f}") if peer else ("", "", "")
        speed = f"{row['windlass'] / rows[0]['windlass']:.2f}"
        memory, its = (_megabytes(row.get(name)) for name in ("memory", "llama_memory"))
        table.add_row(row["format"], _megabytes(row["bytes"]), f"{row['windlass']:.1f}", speed, memory, *cells, its)
    console = bench_console()
    console.print(table)
    console.print(
        "MB: peak resident bytes of a process that answers one request, pages of its files included; windlass: above "
        "those before the model is loaded, llama.cpp: of the whole process",
        soft_wrap=True,
    )
    write_result(results, {"layers": layers, "hidden": hidden, "threads": torch.get_num_threads(), "rows": rows})


def _measure(
    folder: Path, names: list[str], layers: int, hidden: int, rounds: int, tools: Path | None
) -> list[dict[str, Any]]:
    wide = _write_model(folder, layers, hidden)
    engines, files = {"fp32": wide}, {}
    for name in names:
        packed = folder / name
        if not packed.exists():
            write_packed_directory(wide, packed, name, head=True)
        engines[name] = packed
        if tools is not None:
            files[name] = folder / f"{name}.gguf"
            if not files[name].exists():
                write_gguf(packed, files[name])
    own: dict[str, list[float]] = {name: [] for name in engines}
    peer: dict[str, list[float]] = {name: [] for name in files}
    peer_memory: dict[str, int | None] = {}
    for name, path in engines.items():
        with LLM(path, device="cpu", max_sequences=1, skip_tokenizer_init=True, max_model_len=128) as llm:
            _rate(llm)
            for _ in range(rounds):
                own[name].append(_rate(llm))
                if name in files and tools is not None:
                    rate, peer_memory[name] = _run_llama(files[name], tools)
                    peer[name].append(rate)
    rows = []
    for name, path in engines.items():
        row: dict[str, Any] = {"format": name, "windlass": statistics.median(own[name]), "rates": own[name]}
        row["bytes"] = sum(file.stat().st_size for file in path.glob("*.safetensors"))
        run = measure_run(path)
        if run.memory is not None and run.idle_memory is not None:
            row["memory"] = run.memory - run.idle_memory
        if peer.get(name):
            row |= {"llama": statistics.median(peer[name]), "llama_rates": peer[name], "goal": _FORMATS[name]}
            row["llama_memory"] = peer_memory[name]
        rows.append(row)
    return rows


def _write_model(folder: Path, layers: int, hidden: int) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    if not (folder / "wide").exists():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=8192,
            hidden_size=hidden,
            intermediate_size=hidden * 8 // 3 // 256 * 256,
            num_hidden_layers=layers,
            num_attention_heads=hidden // 64,
            num_key_value_heads=hidden // 64,
            max_position_embeddings=512,
            tie_word_embeddings=False,
        )
        LlamaForCausalLM(config).save_pretrained(folder / "wide")
    return folder / "wide"


def _rate(llm: LLM) -> float:
    """Return generated tokens a second, without the prompt's time."""
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (1, _ANSWER + 1)]
    prompt = [list(range(3, 3 + _PROMPT))]
    seconds = []
    for one in params:
        start = time.perf_counter()
        llm.generate(prompt, one)
        seconds.append(time.perf_counter() - start)
    return _ANSWER / (seconds[1] - seconds[0])


def _run_llama(path: Path, tools: Path) -> tuple[float, int | None]:
    """Return the generated tokens a second of llama.cpp's own benchmark, and the peak resident bytes of its process."""
    count = str(torch.get_num_threads())
    command = [str(tools / "llama-batched-bench"), "-m", str(path), "-c", "512"]
    command += ["-npp", str(_PROMPT), "-ntg", str(_ANSWER)]
    command += ["-npl", "1", "-t", count, "-tb", count, "--output-format", "jsonl"]
    for _ in range(_TRIES):  # now and then the program exits with code 0 but prints no row
        with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen(command, stdout=output, stderr=errors, text=True)
            peak = None
            while process.poll() is None:
                peak = _peak_of(process.pid) or peak
                time.sleep(0.02)
            output.seek(0)
            errors.seek(0)
            text, complaints = output.read(), errors.read()
        if process.returncode:
            raise SystemExit(f"{command[0]} failed with code {process.returncode}:\n{complaints}")
        lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
        speeds = [float(line["speed_tg"]) for line in lines if "speed_tg" in line]
        if speeds:
            return speeds[0], peak
    raise SystemExit(f"{command[0]} printed no speed for {path.name}:\n{text}{complaints}")


def _peak_of(pid: int) -> int | None:
    """Return the peak resident bytes of a process; None if it has ended, or without Linux's /proc."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:")), None)


def _megabytes(size: int | None) -> str:
    return "" if size is None else f"{size / 1e6:.0f}"


if __name__ == "__main__":
    typer.run(main)
