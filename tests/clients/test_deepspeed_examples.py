"""Scripts of DeepSpeedExamples as they are: their losses are those of the same training in plain PyTorch.

A script with a plain counterpart is compared with it. The others run twice, once with `clients/plain/deepspeed` as
DeepSpeed, over the same number of ranks. `clients/local` has the parts of torchvision that they use.

Versions: DeepSpeedExamples 45b4b71, transformers 4.57.6 (DeepSpeed-Chat imports names that later versions moved).
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.clients.harness import TEXT, Client, client, words

NEEDS = (
    "transformers==4.57.6 accelerate==1.11.0 peft==0.18.1 trl==0.24.0 datasets==4.0.0 "
    "fire loguru pytz 'sh<2' tensorboard"
)
LOCAL = Path(__file__).parent / "local"
PLAIN = Path(__file__).parent / "plain"
NUMBER = r"(-?\d+\.\d+(?:e-?\d+)?)"

# Training of the CIFAR script's network in plain PyTorch. One process computes the ranks' parts of a batch in turn.
STEPS = 24
BATCH = 16
CIFAR = """
import argparse, importlib.util, json, math, sys
import torch
from torch.utils.data import DataLoader, DistributedSampler
import torchvision

spec = importlib.util.spec_from_file_location("script", sys.argv[1])
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)
ranks, batch, found = int(sys.argv[2]), {batch}, []
net = script.Net(argparse.Namespace(moe=False))
data = torchvision.datasets.CIFAR10("", True, True, None)
loaders = []
for rank in range(ranks):
    sampler = DistributedSampler(data, num_replicas=ranks, rank=rank)
    loaders.append(DataLoader(data, batch_size=batch // ranks, sampler=sampler))
optimizer = torch.optim.AdamW(net.parameters(), lr=0.001, betas=(0.8, 0.999), eps=1e-8, weight_decay=3e-7)
for step, batches in enumerate(zip(*loaders)):
    optimizer.param_groups[0]["lr"] = 0.001 * math.log(max(step, 1)) / math.log(1000)  # 0 twice
    losses = [torch.nn.functional.cross_entropy(net(pictures), labels) for pictures, labels in batches]
    found.append(losses[0].item())
    optimizer.zero_grad()
    (sum(losses) / ranks).backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
print("PLAIN " + json.dumps(found))
"""


@pytest.fixture(scope="module")
def examples() -> Client:
    return client("DEEPSPEED_EXAMPLES", "https://github.com/deepspeedai/DeepSpeedExamples", NEEDS)


Run = Callable[..., str]


@pytest.fixture
def run(examples: Client, tmp_path: Path) -> Run:
    """Runner of a script by the `deepspeed` command in a new folder, with windlass or plain PyTorch as DeepSpeed."""

    def run(script: str, *arguments: object, ranks: int, plain: bool = False, **env: str) -> str:
        where = tmp_path / ("plain" if plain else "ours")
        path = ((PLAIN,) if plain else ()) + (LOCAL, examples.folder / "applications" / "DeepSpeed-Chat")
        places = {"path": path, "stands_in": not plain, "folder": where}
        where.mkdir(exist_ok=True)
        return examples.run(examples.folder / script, *arguments, ranks=ranks, classic=True, **places, **env)

    return run


def numbers(printed: str, line: str) -> list[float]:
    """Return the numbers that the groups of the pattern `line` match, in order."""
    result = re.findall(line, printed)
    return [float(number) for item in result for number in (item if isinstance(item, tuple) else (item,))]


def check(found: list[float], wanted: list[float], count: int, tolerance: float = 1.01e-4) -> None:
    """Assert that both lists have the same `count` numbers within the tolerance, more than half of them distinct."""
    print(f"found {found}, plainly {wanted}")
    assert len(wanted) == count and len(set(wanted)) > count / 2 and all(map(math.isfinite, wanted))
    assert found == pytest.approx(wanted, abs=tolerance, rel=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2])  # on one rank the order of the rows does not depend on the seed
@pytest.mark.parametrize("stage", [3, 2, 1, 0])
def test_cifar_trains_as_in_plain_pytorch(examples: Client, tmp_path: Path, stage: int, ranks: int) -> None:
    """Law: the first rank's losses equal the plain ones, to the three decimals that the script prints."""
    script = examples.folder / "training" / "cifar" / "cifar10_deepspeed.py"
    options = ("--epochs", 1, "--log-interval", 1, "--dtype", "fp32", "--stage", stage)
    pictures = {"PICTURES": str(STEPS * BATCH)}
    printed = examples.run(script, "--deepspeed", *options, ranks=ranks, path=(LOCAL,), **pictures)
    (tmp_path / "plain.py").write_text(CIFAR.format(batch=BATCH))
    standing_in = examples.run(tmp_path / "plain.py", script, ranks, path=(LOCAL,), stands_in=True, **pictures)
    expected = json.loads(standing_in.partition("PLAIN ")[2].splitlines()[0])
    check(numbers(printed, r"\[ 1, +\d+\] loss: +(\S+)"), expected, STEPS, 6e-4)


GAN = rf"Loss_D: {NUMBER} Loss_G: {NUMBER} D\(x\): {NUMBER} D\(G\(z\)\): {NUMBER} / {NUMBER}"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 1])
@pytest.mark.parametrize("clips", [False, True])
def test_a_gan_trains_as_in_plain_pytorch(run: Run, tmp_path: Path, clips: bool, ranks: int) -> None:
    """Law: two engines, where one's gradients go through the other's model, print what the plain counterpart prints.

    A configuration without `gradient_clipping` clips to norm 1, so it is compared with the same script under
    `plain/deepspeed`. A configuration without clipping is compared with `gan_baseline_train.py`.
    """
    config = {"train_batch_size": 64, "optimizer": {"type": "Adam", "params": {"lr": 0.0002, "betas": [0.5, 0.999]}}}
    (tmp_path / "ds_config.json").write_text(json.dumps(config if clips else {**config, "gradient_clipping": 0}))
    options = ("--dataset", "fake", "--workers", 0, "--batchSize", 16, "--ngf", 8, "--ndf", 8)
    deepspeed = ("training/gan/gan_deepspeed_train.py", *options, "--deepspeed_config", tmp_path / "ds_config.json")
    pictures = {"PICTURES": "64"}  # four steps, the same on each rank
    printed = run(*deepspeed, ranks=ranks, **pictures)
    twin = deepspeed if clips else ("training/gan/gan_baseline_train.py", *options)
    plain = run(*twin, ranks=int(clips), plain=True, **pictures)
    steps = list(dict.fromkeys(re.findall(GAN, printed)))  # all ranks print the same lines
    check([float(number) for step in steps for number in step], numbers(plain, GAN), 4 * 5)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 1])
def test_hello_deepspeed_trains_as_in_plain_pytorch(run: Run, tmp_path: Path, ranks: int) -> None:
    """Law: a BERT in bf16 at stage 1, with its optimizer on the host, has the plain losses.

    Two ranks save no checkpoint: each rank names the folder by its own clock, and windlass refuses to save one
    checkpoint in two folders.
    """
    roberta(tmp_path / "tokenizer")
    for place in ("ours", "plain"):
        wikitext(tmp_path / place / "wikitext")
    sizes = ("--num_layers", 2, "--num_heads", 4, "--ff_dim", 64, "--h_dim", 32)
    steps = ("--num_iterations", 7, "--log_every", 1, "--checkpoint_every", 7 if ranks > 1 else 3)
    options = ("--tokenizer", tmp_path / "tokenizer", *sizes, *steps, "--batch_size", 4)
    losses = []
    for plain in (False, True):
        out = tmp_path / f"checkpoints-{plain}"
        out.mkdir()
        offline = {"HF_DATASETS_CACHE": str(tmp_path / f"cache-{plain}")}
        script = ("training/HelloDeepSpeed/train_bert_ds.py", "--checkpoint_dir", out, *options)
        printed = run(*script, ranks=ranks, plain=plain, **offline)
        losses.append(numbers(printed, r"\[Rank 0\] Loss: (\S+)"))
    check(*losses, 6)


PIPELINE = "training/pipeline_parallelism/train.py"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 1])
@pytest.mark.parametrize("stages", [0, 2])
def test_a_pipeline_trains_as_in_plain_pytorch(run: Run, tmp_path: Path, stages: int, ranks: int) -> None:
    """Law: an AlexNet over two pipeline stages, and with data parallelism alone, has the plain losses."""
    if stages > ranks:
        pytest.skip("two stages need two ranks")
    config = {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.9, 0.999], "eps": 1e-8}},
        "csv_monitor": {"enabled": True, "output_path": str(tmp_path / "board"), "job_name": "pipe"},
    }
    (tmp_path / "ds_config.json").write_text(json.dumps(config))
    options = ("--deepspeed_config", tmp_path / "ds_config.json", "-p", stages, "--steps", 20)
    pictures = {"PICTURES": "160"}
    printed = run(PIPELINE, *options, "--backend", "gloo", ranks=ranks, **pictures)
    plain = run(PIPELINE, *options, ranks=1 if stages else ranks, plain=True, **pictures)
    if stages:
        rows = (tmp_path / "board" / "pipe" / "Train_Samples_train_loss.csv").read_text().splitlines()[1:]
        check([float(row.split(",")[1]) for row in rows], numbers(plain, r"loss: (\S+)"), 20)
    else:
        check(numbers(printed, r"loss: (\d\S+)"), numbers(plain, r"loss: (\d\S+)"), 2)


CHAT = "applications/DeepSpeed-Chat/training"


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a tiny OPT with random weights, its tokenizer, and pairs of answers. Return the folder."""
    from datasets import Dataset, DatasetDict

    made = tmp_path_factory.mktemp("chat")
    opt(made / "model")
    rows = [
        {
            "prompt": f"Human: {words(n, 4)} Assistant:",
            "chosen": f" {words(n + 3, 6)}",
            "rejected": f" {words(n + 9, 6)}",
        }
        for n in range(40)
    ]
    splits = {"train": Dataset.from_list(rows), "test": Dataset.from_list(rows[:10])}
    DatasetDict(splits).save_to_disk(str(made / "Dahoas" / "rm-static"))
    return made


def chat_options(chat: Path, out: Path) -> tuple[object, ...]:
    """Return the options of all three steps."""
    data = ("--data_path", chat / "Dahoas" / "rm-static", "--data_output_path", out / "data", "--output_dir", out)
    return (*data, "--dtype", "bf16", "--seed", 1, "--lr_scheduler_type", "constant", "--num_warmup_steps", 0)


AWAY = pytest.mark.parametrize("away", [(), ("--offload",)], ids=["device", "host"])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 1])
@AWAY
@pytest.mark.parametrize("stage", [3, 2, 1, 0])
def test_chat_is_fine_tuned_as_in_plain_pytorch(
    run: Run, chat: Path, tmp_path: Path, stage: int, away: tuple[str, ...], ranks: int
) -> None:
    """Law: step 1 of DeepSpeed-Chat in bf16 has the plain losses, in training and in both evaluations."""
    model = ("--model_name_or_path", chat / "model")
    batches = ("--per_device_train_batch_size", 4 // ranks, "--per_device_eval_batch_size", 4 // ranks)
    options = (*batches, *model, "--max_seq_len", 48, "--learning_rate", 1e-2, "--print_loss")
    script = f"{CHAT}/step1_supervised_finetuning/main.py"
    results = []
    for plain in (False, True):
        common = chat_options(chat, tmp_path / f"out-{plain}")
        zero = ("--zero_stage", stage, *(() if plain else away))
        printed = run(script, *options, *common, *zero, ranks=ranks, plain=plain)
        losses = [numbers(printed, rf"Rank: {rank}, loss = {NUMBER}") for rank in range(ranks)]
        results.append([*numbers(printed, rf"ppl: \S+, loss: {NUMBER}"), *sum(losses, [])])
    check(*results, 2 + 2 * ranks, 1e-3)


HYBRID = ("--enable_hybrid_engine", "--release_inference_cache")
SCORES = rf"chosen_last_scores \(higher is better\) : {NUMBER}, rejected_last_scores \(lower is better\) : {NUMBER}"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 1])
@pytest.mark.parametrize("stage", [3, 2, 1, 0])
def test_chat_reward_model_trains_as_in_plain_pytorch(
    run: Run, chat: Path, tmp_path: Path, stage: int, ranks: int
) -> None:
    """Law: step 2 of DeepSpeed-Chat in bf16 has the plain loss of each epoch, and the plain scores before and after."""
    model = ("--model_name_or_path", chat / "model")
    batches = ("--per_device_train_batch_size", 4 // ranks, "--per_device_eval_batch_size", 4 // ranks)
    options = (*batches, *model, "--max_seq_len", 48, "--learning_rate", 1e-3, "--num_padding_at_beginning", 0)
    script = f"{CHAT}/step2_reward_model_finetuning/main.py"
    results = []
    for plain in (False, True):
        common = chat_options(chat, tmp_path / f"out-{plain}")
        more = ("--num_train_epochs", 3, "--zero_stage", stage)
        printed = run(script, *options, *common, *more, ranks=ranks, plain=plain)
        results.append([*numbers(printed, rf"with loss {NUMBER}"), *numbers(printed, SCORES)])
    check(*results, 3 + 4 * 2, 2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 1])
@pytest.mark.parametrize(("stage", "hybrid"), [(3, ()), (2, ()), (1, ()), (0, ()), (3, HYBRID), (2, HYBRID)], ids=str)
def test_chat_rlhf_trains_as_in_plain_pytorch(
    run: Run, chat: Path, tmp_path: Path, stage: int, hybrid: tuple[str, ...], ranks: int
) -> None:
    """Law: step 3 of DeepSpeed-Chat in bf16, with four models, has the plain actor and critic losses and rewards."""
    batches = ("--per_device_training_batch_size", 4 // ranks, "--per_device_generation_batch_size", 4 // ranks)
    models = ("--actor_model_name_or_path", chat / "model", "--critic_model_name_or_path", critic(chat))
    lengths = ("--max_prompt_seq_len", 40, "--max_answer_seq_len", 8)
    rates = ("--actor_learning_rate", 1e-3, "--critic_learning_rate", 1e-3)
    options = (*batches, *lengths, *rates, "--num_padding_at_beginning", 0)
    script = f"{CHAT}/step3_rlhf_finetuning/main.py"
    results = []
    for plain in (False, True):
        stages = ("--actor_zero_stage", stage, "--critic_zero_stage", stage)
        common = chat_options(chat, tmp_path / f"out-{plain}")
        more = (*stages, *(() if plain else hybrid))
        printed = run(script, *models, *options, *common, *more, ranks=ranks, plain=plain)
        losses = rf"Actor Loss: {NUMBER} \| Critic Loss: {NUMBER}"
        results.append([*numbers(printed, losses), *numbers(printed, rf"Average reward score: {NUMBER}")])
    check(*results, 4 * 3, 2e-3)


def critic(chat: Path) -> Path:
    """Save a reward model with random weights in the files that step 2 writes. Return the folder."""
    import torch
    from safetensors.torch import load_file

    made = chat / "critic"
    if not made.exists():
        shutil.copytree(chat / "model", made)
        weights = load_file(made / "model.safetensors")
        (made / "model.safetensors").unlink()
        named = {
            f"rwtransformer.{name.removeprefix('model.')}": value
            for name, value in weights.items()
            if "head" not in name
        }
        torch.manual_seed(1)
        torch.save({**named, "v_head.weight": torch.randn(1, 32) / 4}, made / "pytorch_model.bin")
    return made


def opt(folder: Path) -> None:
    """Save an OPT with random weights, and a tokenizer in the same files as OPT's."""
    import torch
    from transformers import OPTConfig, OPTForCausalLM

    size = tokenizer(folder, "GPT2Tokenizer", ["<|endoftext|>"], eos_token="<|endoftext|>", bos_token="<|endoftext|>")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    size = -(-size // 8) * 8  # the scripts round the vocabulary up to a multiple of 8, and the new rows are random
    tokens = {"vocab_size": size, "eos_token_id": 0, "bos_token_id": 0, "pad_token_id": 0}
    config = OPTConfig(**sizes, **tokens, word_embed_proj_dim=32, max_position_embeddings=64, dropout=0.0, init_std=0.2)
    OPTForCausalLM(config).save_pretrained(folder)


def roberta(folder: Path) -> None:
    """Save a tokenizer whose first tokens are RoBERTa's special tokens."""
    special = {
        "bos_token": "<s>",
        "pad_token": "<pad>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "mask_token": "<mask>",
    }
    tokenizer(folder, "RobertaTokenizer", list(special.values()), **special)


def tokenizer(folder: Path, kind: str, special: list[str], **named: str) -> int:
    """Save a byte-level tokenizer as vocab.json and merges.txt, and return the number of its tokens."""
    import tokenizers

    made = tokenizers.ByteLevelBPETokenizer()
    made.train_from_iterator([TEXT] * 5, 300, special_tokens=special, show_progress=False)
    folder.mkdir(parents=True)
    made.save_model(str(folder))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind, **named}))
    (folder / "config.json").write_text(json.dumps({"model_type": {"R": "roberta", "G": "gpt2"}[kind[0]]}))
    return int(made.get_vocab_size())


def wikitext(folder: Path) -> None:
    """Write the files that `load_dataset("wikitext", "wikitext-2-v1")` finds in the working directory."""
    folder.mkdir(parents=True)
    described = "configs:\n- config_name: wikitext-2-v1\n  data_files:\n  - split: train\n    path: train.jsonl\n"
    (folder / "README.md").write_text(f"---\n{described}---\n")
    (folder / "train.jsonl").write_text("".join(json.dumps({"text": words(n, 12)}) + "\n" for n in range(24)))
