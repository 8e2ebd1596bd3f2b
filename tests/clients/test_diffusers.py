"""diffusers' text-to-image training with LoRA: its losses with windlass as DeepSpeed are those without DeepSpeed.

Versions: the script of diffusers 58eb52c, with diffusers 0.42.1, transformers 5.23.0, accelerate 1.15.0, peft 0.21.2,
torchvision 0.28.0.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.clients.harness import TEXT, Client, client, words
from tests.ports import free_port

NEEDS = "diffusers ftfy pillow torchvision (a CPU build)"
STEPS = 5
BATCH = 4

# Program that saves a Stable Diffusion with random weights. The client's interpreter, which has diffusers, runs it.
MODEL = """
import json, string, sys
import torch
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

out = sys.argv[1]
torch.manual_seed(0)
blocks = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 4, "sample_size": 8}
down, up = ("DownBlock2D", "CrossAttnDownBlock2D"), ("CrossAttnUpBlock2D", "UpBlock2D")
unet = UNet2DConditionModel(
    cross_attention_dim=32, attention_head_dim=8, down_block_types=down, up_block_types=up, **blocks
)
unet.save_pretrained(f"{out}/unet")
encoders = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
AutoencoderKL(latent_channels=4, **blocks, **encoders).save_pretrained(f"{out}/vae")
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
tokens = {"vocab_size": 60, "bos_token_id": 52, "eos_token_id": 53, "pad_token_id": 53, "max_position_embeddings": 16}
CLIPTextModel(CLIPTextConfig(**sizes, **tokens)).save_pretrained(f"{out}/text_encoder")
letters = [*string.ascii_lowercase, *(letter + "</w>" for letter in string.ascii_lowercase)]
ids = {token: number for number, token in enumerate([*letters, "<|startoftext|>", "<|endoftext|>"])}
CLIPTokenizer(vocab=ids, merges=[], model_max_length=16).save_pretrained(f"{out}/tokenizer")
DDPMScheduler(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012).save_pretrained(f"{out}/scheduler")
index = {
    "_class_name": "StableDiffusionPipeline",
    "scheduler": ["diffusers", "DDPMScheduler"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "unet": ["diffusers", "UNet2DConditionModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}
json.dump(index, open(f"{out}/model_index.json", "w"))
"""

AUTO = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 1, "gradient_clipping": 1.0}
HOST = {"device": "cpu", "pin_memory": False}
# Not stage 3: transformers would then shard the text encoder too, which the script uses outside of any engine.
CONFIGS = {
    "z2": {"stage": 2},
    "z2-offload": {"stage": 2, "offload_optimizer": HOST},
}


@pytest.fixture(scope="module")
def diffusers() -> Client:
    return client("DIFFUSERS", "https://github.com/huggingface/diffusers", NEEDS)


@pytest.fixture(scope="module")
def folder(diffusers: Client, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(diffusers, tmp_path_factory.mktemp("diffusers"))


def make(diffusers: Client, made: Path) -> Path:
    """Write a model, pictures with captions, and the configurations."""
    from PIL import Image

    (made / "model.py").write_text(MODEL)
    diffusers.run(made / "model.py", made / "model")
    (made / "pictures").mkdir()
    random = np.random.default_rng(0)
    lines = []
    for number in range(STEPS * BATCH):
        name = f"{number}.png"
        Image.fromarray(random.integers(0, 255, (16, 16, 3), np.uint8)).save(made / "pictures" / name)
        lines.append(json.dumps({"file_name": name, "text": words(number, 3)}))
    assert set("".join(TEXT.split())) <= set("abcdefghijklmnopqrstuvwxyz")  # the vocabulary of the tokenizer
    (made / "pictures" / "metadata.jsonl").write_text("\n".join(lines))
    for name, zero in CONFIGS.items():
        config = {**AUTO, "zero_optimization": zero, "zero_force_ds_cpu_optimizer": False}
        (made / f"{name}.json").write_text(json.dumps(config))
    return made


def losses(diffusers: Client, folder: Path, config: str | None, ranks: int) -> list[float]:
    """Return the losses of the first steps from the script's TensorBoard files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = folder / f"{config}-{ranks}"
    options = {
        "pretrained_model_name_or_path": "model",
        "train_data_dir": "pictures",
        "resolution": 16,
        "train_batch_size": BATCH // ranks,
        "max_train_steps": STEPS,
        "learning_rate": 1e-2,
        "lr_warmup_steps": 0,
        "rank": 4,
        "seed": 1,
        "output_dir": out,
        "report_to": "tensorboard",
    }
    spoken = [word for option, value in options.items() for word in (f"--{option}", value)]
    script = diffusers.folder / "examples" / "text_to_image" / "train_text_to_image_lora.py"
    here = replace(diffusers, folder=folder)
    env = {"HF_HOME": str(folder / f"home-{config}-{ranks}")}
    if config is not None:
        launcher = ("-m", "accelerate.commands.launch", "--num_processes", ranks, "--num_machines", 1)
        launcher += ("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", free_port())
        started: tuple[object, ...] = (*launcher, "--use_deepspeed", "--deepspeed_config_file", f"{config}.json")
        here.run(*started, script, *spoken, stands_in=True, **env)
    else:  # `accelerate launch --cpu` starts only one process
        started = ("-m", "torch.distributed.run", "--nproc-per-node", ranks, "--master-port", free_port())
        here.run(*started, script, *spoken, ACCELERATE_USE_CPU="true", **env)
    events = EventAccumulator(str(next(out.glob("logs/*/events*")).parent))
    events.Reload()
    return [event.value for event in events.Scalars("train_loss")]


@pytest.fixture(scope="module")
def plain(diffusers: Client, folder: Path) -> Callable[[int], list[float]]:
    """Return the losses without DeepSpeed, by number of ranks."""
    return functools.cache(lambda ranks: losses(diffusers, folder, None, ranks))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 1])
@pytest.mark.parametrize("config", CONFIGS)
def test_losses_equal_plain_training(
    diffusers: Client, folder: Path, plain: Callable[[int], list[float]], config: str, ranks: int
) -> None:
    expected, actual = plain(ranks), losses(diffusers, folder, config, ranks)
    print(f"{config} on {ranks}: {actual}, plainly {expected}")
    assert len(expected) == STEPS and len(set(expected)) == STEPS
    assert actual == pytest.approx(expected, abs=1.01e-4)
