"""Tests that Python files inside a model directory run only if the user allows it."""

from __future__ import annotations

import ast
import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import windlass
from tests.paused_collection import paused_collection
from windlass.base.errors import DataError, ModelError

ROOT = Path(__file__).parents[2]
READERS = {"from_pretrained", "from_config", "pipeline", "load_dataset", "load_dataset_builder"}
RUNNERS = {"get_class_from_dynamic_module", "custom_object_save", "load_custom_generate"}


def loose_calls(source: str) -> list[int]:
    """Return the lines of `source` that load a Hugging Face directory without passing `trust_remote_code`."""
    if not any(name in source for name in READERS | RUNNERS):  # parsing takes long
        return []
    tree = ast.parse(source)
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("windlass", "bench"):
            own |= {alias.asname or alias.name for alias in node.names}
    results = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        if isinstance(function, ast.Name):
            name = "" if function.id in own else function.id
        else:
            name = function.attr if isinstance(function, ast.Attribute) else ""
        if name in RUNNERS or (name in READERS and not says_so(node)):
            results.append(node.lineno)
    return results


def says_so(call: ast.Call) -> bool:
    """Return True if the call passes `trust_remote_code` as False or as the user's option of that name."""
    for keyword in call.keywords:
        if keyword.arg == "trust_remote_code":
            value = keyword.value
            if isinstance(value, ast.Constant):
                return value.value is False
            name = value.attr if isinstance(value, ast.Attribute) else getattr(value, "id", "")
            return name == "trust_remote_code"
    return False


def test_calls_that_read_a_model_directory_pass_trust_remote_code() -> None:
    files = [path for folder in ("windlass", "bench", "tools", "examples") for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 300
    with paused_collection():
        loose = {f"{path.relative_to(ROOT)}:{line}" for path in files for line in loose_calls(path.read_text())}
    assert not loose


@pytest.mark.parametrize(
    ("source", "loose"),
    [
        ("AutoModel.from_pretrained(name)", True),
        ("AutoModel.from_pretrained(name, trust_remote_code=None)", True),
        ("AutoModel.from_pretrained(name, trust_remote_code=True)", True),
        ("AutoModel.from_pretrained(name, **more)", True),
        ("AutoModel.from_pretrained(name, trust_remote_code=False)", False),
        ("AutoModel.from_config(c, trust_remote_code=plan.trust_remote_code)", False),
        ("from transformers import pipeline\npipeline('x')", True),
        ("from windlass.optim.loss_scale import from_config\nfrom_config(c)", False),
        ("get_class_from_dynamic_module('a', 'b', trust_remote_code=False)", True),
    ],
)
def test_walk_finds_calls_without_trust_remote_code(source: str, loose: bool) -> None:
    assert bool(loose_calls(source)) == loose


CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
Path({mark!r}).touch()
class StrangeConfig(LlamaConfig):
    model_type = "strange"
class StrangeModel(LlamaForCausalLM):
    config_class = StrangeConfig
class StrangeTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def strange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Path]]:
    """Yield a model directory with custom code, and the marker file that the code creates. Stdin answers yes."""
    dynamic_modules = pytest.importorskip("transformers.dynamic_module_utils")
    from transformers import LlamaConfig, LlamaForCausalLM

    from windlass.data.tokenizer import train_tokenizer

    folder, mark = tmp_path / "strange", tmp_path / "ran"
    tokenizer = train_tokenizer(["def f(x): return x"] * 3, 270, folder)
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=tokenizer.vocab_size, **sizes)).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "strange", "architectures": ["StrangeModel"], "eos_token_id": tokenizer.eos}
    config["auto_map"] = {"AutoConfig": "code.StrangeConfig", "AutoModelForCausalLM": "code.StrangeModel"}
    (folder / "config.json").write_text(json.dumps(config))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "StrangeTokenizer", "auto_map": {"AutoTokenizer": [None, "code.StrangeTokenizer"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "code.py").write_text(CODE.format(mark=str(mark)))
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(
        CODE.format(mark=str(mark)) + "def generate(inputs, model, **more):\n    return inputs\n"
    )
    monkeypatch.setattr(dynamic_modules, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 20))
    yield folder, mark
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        del sys.modules[name]


def generated(folder: Path, **trust: bool) -> Any:
    from windlass.cli.training.text_continuation import generate_continuation

    return generate_continuation(folder, "def", max_new_tokens=2, **trust)


def trained(folder: Path, **trust: bool) -> Any:
    from windlass.cli.training.model_builder import build_model

    return build_model(str(folder), 200, 8, 0, 0, **trust)


def initialised(folder: Path, **trust: bool) -> Any:
    """Build the model as `trained` does, but from config.json alone."""
    (folder / "model.safetensors").unlink()
    return trained(folder, **trust)


def verified(folder: Path, **trust: bool) -> Any:
    from windlass.verify.named_model_training import build_model

    return build_model(str(folder), **trust)


def called(folder: Path, **trust: bool) -> Any:
    from transformers import AutoModelForCausalLM

    return windlass.from_pretrained(AutoModelForCausalLM, folder, **trust)


def prepared(folder: Path, **trust: bool) -> Any:
    return windlass.init_inference(folder, **trust)


def called_by_class(folder: Path, **trust: bool) -> Any:
    """Load the directory with a class of transformers: only the directory's `generate` is custom code."""
    from transformers import LlamaForCausalLM

    return windlass.from_pretrained(LlamaForCausalLM, folder, **trust)


@pytest.fixture
def alone() -> Iterator[None]:
    started = not torch.distributed.is_initialized()
    windlass.init_distributed()
    yield
    if started:
        torch.distributed.destroy_process_group()


REFUSING = [generated, trained, initialised, verified, called, prepared]


@pytest.mark.parametrize("read", REFUSING, ids=lambda read: read.__name__)
def test_code_in_a_directory_is_refused_regardless_of_stdin(
    read: Callable[..., Any], strange: tuple[Path, Path], alone: None
) -> None:
    folder, mark = strange
    with pytest.raises(ModelError, match="trust.remote.code") as refusal:
        read(folder)
    assert str(folder) in str(refusal.value)
    assert not mark.exists()
    assert sys.stdin.read().count("y") == 20  # no prompt consumed one of the 20 answers on stdin


def test_custom_generate_is_ignored(strange: tuple[Path, Path], alone: None) -> None:
    folder, mark = strange
    assert called_by_class(folder).config.vocab_size > 256
    assert not mark.exists()


@pytest.mark.parametrize("read", REFUSING, ids=lambda read: read.__name__)
def test_remote_code_runs_with_the_flag(read: Callable[..., Any], strange: tuple[Path, Path], alone: None) -> None:
    folder, mark = strange
    read(folder, trust_remote_code=True)
    assert mark.exists()


def test_a_data_set_s_script_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    from windlass.data.document_formats import read_hub

    requested: list[Any] = []

    def load(*names: Any, **keywords: Any) -> Any:
        requested.append(keywords["trust_remote_code"])
        raise ValueError("Dataset scripts are no longer supported, but found x.py")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(DataError, match=r"hub:someone/x"):
        list(read_hub("someone/x", "text"))
    assert requested == [False]
