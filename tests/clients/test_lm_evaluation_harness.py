"""lm-evaluation-harness: the results of `windlass serve` are those of its own transformers model.

Versions: lm-eval 0.4.13, with transformers 5.23.0, datasets 5.2.0.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.clients.harness import ROOT, Client, client, tiny_llama, words
from tests.ports import free_port

NEEDS = "lm-eval[api]"
WINDOW = 64
HEAD = "dataset_path: json\ntest_split: train\n"

# One task for each kind of request that the harness sends.
TASKS = {
    "choice": """output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: "{{choices}}"
doc_to_target: 0
metric_list: [{metric: acc}]
""",
    "rolling": """output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}]
""",
    "generation": """output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "{{text}}"
generation_kwargs: {until: [" tree"], max_gen_toks: 12, do_sample: false, temperature: 0.0}
metric_list: [{metric: exact_match}]
""",
}


@pytest.fixture(scope="module")
def harness() -> Client:
    return client("LM_EVAL", "https://github.com/EleutherAI/lm-evaluation-harness", NEEDS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a tiny Llama, the documents and the tasks."""
    made = tmp_path_factory.mktemp("lm_eval")
    tiny_llama(made / "model")
    for name, task in TASKS.items():
        # Texts of "rolling" are longer than the window.
        documents = [
            {
                "text": words(n, 90 if name == "rolling" else 3 + n),
                "choices": [" " + words(n + k, 1 + k) for k in (7, 3, 5)],
            }
            for n in range(4 if name == "rolling" else 12)
        ]
        (made / f"{name}.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))
        data = json.dumps({"data_files": str(made / f"{name}.jsonl")})
        (made / f"{name}.yaml").write_text(f"task: {name}\ndataset_kwargs: {data}\n{HEAD}{task}")
    return made


@pytest.fixture(scope="module")
def server(harness: Client, folder: Path) -> Iterator[str]:
    """Serve the model, and return the address."""
    port = free_port()
    command = [harness.python, "-m", "windlass", "serve", str(folder / "model"), "--port", str(port)]
    process = subprocess.Popen(command, cwd=ROOT)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"{address}/ready").close()
                break
            except (urllib.error.URLError, ConnectionError):
                assert process.poll() is None, f"the server ended with {process.returncode}"
                time.sleep(0.2)
        else:
            raise TimeoutError(f"{address}/ready did not answer within two minutes")
        yield address
    finally:
        process.terminate()
        process.wait()


Answers = dict[str, list[object]]


@pytest.fixture(scope="module")
def evaluate(harness: Client, folder: Path) -> Callable[[str, str, list[str]], Answers]:
    """Return a function that evaluates a model (its kind and arguments) on tasks. It returns the answers in order."""
    outs = (folder / f"out{n}" for n in itertools.count())

    def run(kind: str, arguments: str, tasks: list[str]) -> Answers:
        out = next(outs)
        options = f"--include_path {folder} --output_path {out} --log_samples --batch_size 1 --device cpu".split()
        options += ["--model", kind, "--model_args", arguments, "--tasks", ",".join(tasks)]
        harness.run("-m", "lm_eval", *options, folder=folder, HF_HOME=str(folder / "home"))
        answers: Answers = {}
        for name in tasks:
            (samples,) = out.rglob(f"samples_{name}_*.jsonl")
            rows = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda row: int(row["doc_id"]))
            answers[name] = [row["filtered_resps"] for row in rows]
        return answers

    return run


@pytest.mark.slow
def test_answers_equal_those_of_transformers(
    folder: Path, server: str, evaluate: Callable[[str, str, list[str]], Answers]
) -> None:
    model = folder / "model"
    served = evaluate(
        "local-completions",
        f"base_url={server}/v1/completions,model=model,tokenizer={model},num_concurrent=4,max_length={WINDOW}",
        list(TASKS),
    )
    # The harness keeps one token of a server's window for the answer, and one more in rolling requests.
    plain = f"pretrained={model},dtype=float32,max_length="
    expected = evaluate("hf", f"{plain}{WINDOW - 1}", ["choice", "generation"])
    expected |= evaluate("hf", f"{plain}{WINDOW - 2}", ["rolling"])
    for name in TASKS:
        print(f"{name}: {served[name][:2]}, with transformers {expected[name][:2]}")
        assert len(served[name]) == len(expected[name]) > 0
        assert _numbers(served[name]) == pytest.approx(_numbers(expected[name]), abs=1e-3)
        assert _texts(served[name]) == _texts(expected[name])
    assert len(_numbers(served["choice"])) == 36 and len(_texts(served["generation"])) == 12


def _numbers(answer: object) -> list[float]:
    if isinstance(answer, list):
        return [number for part in answer for number in _numbers(part)]
    try:
        return [float(str(answer))]
    except ValueError:
        return []


def _texts(answer: object) -> list[str]:
    if isinstance(answer, list):
        return [text for part in answer for text in _texts(part)]
    return [] if _numbers(answer) else [str(answer)]
