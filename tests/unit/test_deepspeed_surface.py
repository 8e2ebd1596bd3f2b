"""Law: outside `windlass/compat` a name of DeepSpeed occurs only in the listed files, for the reason given there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import windlass

PACKAGE = Path(windlass.__file__).parent
WORD = re.compile(r"[\w./-]*deepspeed[\w./-]*", re.IGNORECASE)


def surface(source: str) -> Iterator[str]:
    """Yield identifiers, imported modules and words of strings in `source` that contain "deepspeed".

    Comments and docstrings, also those of attributes, do not count.
    """
    if "deepspeed" not in source.lower():  # parsing takes long
        return
    tree = ast.parse(source)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        texts: list[str | None] = [getattr(node, field, None) for field in ("name", "id", "attr", "arg", "asname")]
        if isinstance(node, ast.ImportFrom):
            texts.append(node.module)
        if isinstance(node, ast.Global | ast.Nonlocal):
            texts += node.names
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            texts.append(node.value)
        for text in texts:
            if isinstance(text, str):
                yield from (word.strip(".-/") for word in WORD.findall(text))


def find_surface() -> dict[str, set[str]]:
    """Return the words of each file of the package outside compat and of its path, by path."""
    found: dict[str, set[str]] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        path = file.relative_to(PACKAGE).as_posix()
        if not path.startswith("compat/"):
            words = {*surface(file.read_text(encoding="utf-8")), *WORD.findall(path)}
            if words:
                found[path] = words
    return found


ALLOWED: dict[str, dict[str, str]] = {
    "keys and values of configurations, and the reasons that are printed with keys": {
        "config/auto_values.py": "DeepSpeedPlugin",
        "config/checkpoint_section.py": "DeepSpeed deepspeed",
        "config/compression_section.py": "DeepSpeed",
        "config/contradictions.py": "_deepspeed_checkpoint_format _deepspeed_format_of_compressed_optimizers deepspeed",
        "config/elasticity_section.py": "DeepSpeed",
        "config/expert_parallel_section.py": "DeepSpeed",
        "config/inference_section.py": "DeepSpeed",
        "config/monitor_section.py": "DeepSpeedJobName deepspeed",
        "config/optimizer_section.py": "DeepSpeed",
        "config/pipeline_section.py": "DeepSpeed",
        "config/precision_section.py": "deepspeed.initialize",
        "config/root_config.py": "DeepSpeed",
        "config/zero_section.py": "DeepSpeed",
    },
    "a checkpoint format, which configurations name; compat implements it": {
        "checkpoint/foreign_formats.py": "DeepSpeedFormat deepspeed windlass.compat.checkpoint.deepspeed_format",
    },
    "signature of initialize and of the engine that scripts use": {
        "initialize.py": "args.deepspeed_config deepspeed deepspeed_config deepspeed_io",
        "engine/data_loaders.py": "deepspeed_io",
        "engine/training_engine.py": "deepspeed_io",
    },
    "signatures of compression functions, which take the configuration by this name": {
        "compress/compression_training.py": "deepspeed_config",
        "compress/redundancy_clean.py": "deepspeed_config",
    },
    "text of an error that names the remedy": {
        "inference/inference_model.py": "deepspeed.init_inference",
    },
    "attributes of MoE layers, which are keys of state dicts: checkpoints of every release stay loadable": {
        "parallel/experts/expert_list.py": "deepspeed_experts",
        "parallel/experts/mixture_of_experts.py": "deepspeed_moe",
        "parallel/tensor/plan_builder.py": "deepspeed_moe deepspeed_moe.experts deepspeed_moe.gate",
    },
    "options of launchers and scripts, files and variables that launchers read, and their help": {
        "cli/check.py": "DeepSpeed",
        "cli/run.py": "DeepSpeed as-deepspeed as_deepspeed deepspeed",
        "cli/tune.py": "as-deepspeed as_deepspeed deepspeed deepspeed_config",
        "comm/bootstrap.py": "DEEPSPEED_TIMEOUT",
        "launch/config_arguments.py": "deepspeed deepspeed_config",
        "launch/exported_environment.py": "deepspeed_env",
        "launch/launch_command.py": "deepspeed",
        "launch/launch_flags.py": "DeepSpeed deepspeed tmp/PID.deepspeed",
        "tune/trial_command.py": "deepspeed deepspeed-config deepspeed_config",
        "tune/trial_process.py": "deepspeed",
    },
    "measurements of an installed DeepSpeed": {
        "cli/bench.py": "DeepSpeed",
        "cli/benches/bar_chart.py": "DeepSpeed",
        "cli/benches/bench_engines.py": "_deepspeed_engine deepspeed deepspeed_engine_from_config import_deepspeed",
        "cli/benches/bench_rank.py": "deepspeed deepspeed_engine_from_config",
        "cli/benches/bench_results.py": "deepspeed",
        "cli/benches/deepspeed_baseline.py": "DeepSpeed cli/benches/deepspeed_baseline.py deepspeed "
        "deepspeed.accelerator deepspeed_engine_config import_deepspeed",
        "cli/benches/offload_bench.py": "DeepSpeed _DEEPSPEED_ROWS _deepspeed_configs deepspeed_baseline "
        "deepspeed_engine_config",
    },
    "a package whose version or presence is asked": {
        "observe/environment/version_facts.py": "deepspeed",
        "zero/sharded_init/from_pretrained_patch.py": "is_deepspeed_zero3_enabled",
    },
}
"""Words of each file, separated by spaces, under the reason for which they are allowed there."""


def test_the_search_finds_each_kind_of_name() -> None:
    source = '''
"""DeepSpeed's names."""
import deepspeed.comm as one
from deepspeed.ops import two as deepspeed_ops  # DeepSpeed
class DeepSpeedEngine:
    """As DeepSpeed's."""
    attribute: int
    """As DeepSpeed's."""
def deepspeed_io(deepspeed_config, *, other=DEEPSPEED): return f"{other} of DeepSpeed's", x.deepspeed, y(deepspeed_z=1)
'''
    assert sorted(surface(source)) == [
        *("DEEPSPEED", "DeepSpeed", "DeepSpeedEngine", "deepspeed", "deepspeed.comm", "deepspeed.ops"),
        *("deepspeed_config", "deepspeed_io", "deepspeed_ops", "deepspeed_z"),
    ]


def test_names_of_deepspeed_lie_in_compat() -> None:
    allowed = {path: set(words.split()) for files in ALLOWED.values() for path, words in files.items()}
    found = find_surface()
    added = {path: new for path, words in found.items() if (new := words - allowed.get(path, set()))}
    assert not added, f"move these names to windlass/compat, or list them with a reason: {added}"
    gone = {path: old for path, words in allowed.items() if (old := words - found.get(path, set()))}
    assert not gone, f"delete these exceptions, which the files do not need any more: {gone}"
