"""transformers' example scripts as they are: their losses with windlass as DeepSpeed are those without DeepSpeed.

Versions: the scripts of transformers d6a6c82 (5.0.0.dev0), with transformers 5.23.0, accelerate 1.15.0, datasets 5.2.0,
evaluate 0.4.6, torchvision 0.28.0, torchcodec 0.13.0.
"""

from __future__ import annotations

import csv
import functools
import json
import wave
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.clients.harness import TEXT, Client, client, words
from tests.ports import free_port

NEEDS = (
    "evaluate scikit-learn rouge-score nltk librosa soundfile jiwer pillow torchvision torchcodec (CPU builds of both)"
)
STEPS = 5
BATCH = 4

# Metric in place of those that the scripts load from the hub. Its values are not used.
METRIC = """
import datasets
import evaluate


class Metric(evaluate.Metric):
    def _info(self):
        features = datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references):
        return {"right": sum(one == other for one, other in zip(predictions, references)) / len(references)}
"""

AUTO: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": "auto",
    "train_batch_size": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}
SIZES = {"reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": 0}
HOST = {"device": "cpu", "pin_memory": False}
ADAMW = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}
CONFIGS: dict[str, dict[str, Any]] = {
    "z2": {"zero_optimization": {"stage": 2}},
    "z2-offload": {"zero_optimization": {"stage": 2, "offload_optimizer": HOST}, "optimizer": ADAMW},
    "z3": {"zero_optimization": {"stage": 3, **SIZES}, "optimizer": ADAMW},
    "z3-offload": {"zero_optimization": {"stage": 3, **SIZES, "offload_optimizer": HOST, "offload_param": HOST}},
}


@dataclass(frozen=True)
class Script:
    """Script, its options, and the function that writes the model and data that the options name."""

    path: str
    make: Callable[[Path], None]
    options: dict[str, object] = field(default_factory=dict)
    stages: tuple[str, ...] = ("z3", "z2")


def text_model(folder: Path, model: Any) -> None:
    """Save a model and a tokenizer of 300 tokens."""
    from windlass.data.tokenizer import train_tokenizer

    train_tokenizer([TEXT] * 5, 300, folder)
    model.save_pretrained(folder)


def make_clm(folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=300, eos_token_id=0, bos_token_id=0, pad_token_id=1, initializer_range=0.2, **sizes)
    text_model(folder / "model", LlamaForCausalLM(config))
    (folder / "train.txt").write_text("\n".join(words(n, 12) for n in range(80)))


def tiny_bert(**options: Any) -> Any:
    """Return the configuration of a BERT."""
    from transformers import BertConfig

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return BertConfig(vocab_size=310, pad_token_id=1, initializer_range=0.2, **sizes, **options)


def sentence_pairs() -> list[dict[str, Any]]:
    return [{"sentence1": words(n, 5), "sentence2": words(n + 7, 4), "label": n % 3} for n in range(40)]


def write_rows(file: Path, rows: list[dict[str, Any]]) -> None:
    """Write one JSON object per line."""
    file.write_text("\n".join(map(json.dumps, rows)))


def make_glue(folder: Path) -> None:
    """Write a BERT without a classification head: the script adds a head with random weights."""
    from transformers import BertModel

    text_model(folder / "model", BertModel(tiny_bert()))
    for name in ("train", "validation"):
        write_rows(folder / f"{name}.json", sentence_pairs())


def make_classification(folder: Path) -> None:
    from transformers import BertForSequenceClassification

    text_model(folder / "model", BertForSequenceClassification(tiny_bert(num_labels=3)))
    for name in ("train", "validation"):
        with open(folder / f"{name}.csv", "w", newline="") as file:
            table = csv.DictWriter(file, ["sentence1", "sentence2", "label"])
            table.writeheader()
            table.writerows(sentence_pairs())


def make_mlm(folder: Path) -> None:
    """Write a BERT, and a tokenizer that also has the token for masked words."""
    from transformers import AutoTokenizer, BertForMaskedLM

    text_model(folder / "model", BertForMaskedLM(tiny_bert()))
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.add_special_tokens({"mask_token": "[MASK]"})
    tokenizer.save_pretrained(folder / "model")
    (folder / "train.txt").write_text("\n".join(words(n, 12) for n in range(80)))


def make_ner(folder: Path) -> None:
    from transformers import BertForTokenClassification

    text_model(folder / "model", BertForTokenClassification(tiny_bert(num_labels=3)))
    sentences = [words(n, 6).split() for n in range(40)]
    write_rows(folder / "train.json", [{"tokens": s, "ner_tags": [f"kind{len(w) % 3}" for w in s]} for s in sentences])


def make_swag(folder: Path) -> None:
    from transformers import BertForMultipleChoice

    text_model(folder / "model", BertForMultipleChoice(tiny_bert()))
    rows = [
        {"sent1": words(n, 4), "sent2": words(n + 1, 2), "label": n % 4}
        | {f"ending{end}": words(n + 5 * end, 3) for end in range(4)}
        for n in range(40)
    ]
    write_rows(folder / "train.json", rows)


def make_qa(folder: Path) -> None:
    from transformers import BertForQuestionAnswering

    text_model(folder / "model", BertForQuestionAnswering(tiny_bert()))
    rows = []
    for number in range(40):
        context = words(number, 9)
        answer = context.split()[number % 9]
        found = {"text": [answer], "answer_start": [context.index(answer)]}
        rows.append({"id": str(number), "question": words(number + 3, 4), "context": context, "answers": found})
    (folder / "train.json").write_text(json.dumps({"data": rows}))


def tiny_t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    tokens = {"vocab_size": 300, "eos_token_id": 0, "pad_token_id": 1, "decoder_start_token_id": 1}
    return T5ForConditionalGeneration(T5Config(**tokens, **sizes))


def make_summarization(folder: Path) -> None:
    text_model(folder / "model", tiny_t5())
    write_rows(folder / "train.json", [{"text": words(n, 12), "summary": words(n + 3, 4)} for n in range(40)])
    (folder / "nltk_data" / "tokenizers" / "punkt").mkdir(parents=True)


def make_translation(folder: Path) -> None:
    text_model(folder / "model", tiny_t5())
    rows = [{"translation": {"en": words(n, 10), "de": words(n + 3, 6)}} for n in range(40)]
    write_rows(folder / "train.json", rows)


def make_images(folder: Path) -> None:
    """Write a ViT with its head. At stage 3 transformers would draw other values for a new head."""
    from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = ViTConfig(image_size=16, patch_size=4, initializer_range=0.2, num_labels=3, **sizes)
    ViTForImageClassification(config).save_pretrained(folder / "model")
    ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(folder / "model")
    draw_images(folder / "images")


def draw_images(folder: Path) -> None:
    """Write 24 pictures of three classes, with one folder for each class."""
    from PIL import Image

    random = np.random.default_rng(0)
    for number in range(24):
        place = folder / f"kind{number % 3}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 255, (20, 20, 3), np.uint8)).save(place / f"{number}.png")


def tiny_wav2vec(**options: Any) -> Any:
    """Return the configuration of a Wav2Vec2 without dropout."""
    from transformers import Wav2Vec2Config

    dropouts = ("hidden", "activation", "attention", "feat_proj", "feat_quantizer")
    return Wav2Vec2Config(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        conv_dim=(16, 16),
        conv_kernel=(10, 8),
        conv_stride=(10, 32),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2,
        initializer_range=0.2,
        layerdrop=0.0,
        final_dropout=0.0,
        apply_spec_augment=False,
        **{f"{name}_dropout": 0.0 for name in dropouts},
        **options,
    )


def record(file: Path, seed: int, samples: int) -> None:
    """Write noise as a mono recording of 16000 samples a second."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(file), "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(16000)
        out.writeframes(np.random.default_rng(seed).integers(-9000, 9000, samples, np.int16).tobytes())


def make_speech(folder: Path) -> None:
    from transformers import Wav2Vec2CTCTokenizer, Wav2Vec2FeatureExtractor, Wav2Vec2Model

    # The script would resume from a model given as a folder, so the model is in the hub's cache.
    downloaded = folder / "hub" / "models--tiny--wav2vec2"
    (downloaded / "refs").mkdir(parents=True)
    (downloaded / "refs" / "main").write_text("0" * 40)
    Wav2Vec2Model(tiny_wav2vec()).save_pretrained(downloaded / "snapshots" / ("0" * 40))
    extractor = Wav2Vec2FeatureExtractor(return_attention_mask=True)
    extractor.save_pretrained(downloaded / "snapshots" / ("0" * 40))
    letters = {letter: number for number, letter in enumerate(["[PAD]", "[UNK]", "|", *sorted({*TEXT} - {" "})])}
    (folder / "vocab.json").write_text(json.dumps(letters))
    vocabulary = Wav2Vec2CTCTokenizer(folder / "vocab.json", unk_token="[UNK]", pad_token="[PAD]")
    vocabulary.save_pretrained(folder / "letters")
    lines = ["file_name,text"]
    for number in range(24):
        record(folder / "speech" / "train" / f"{number}.wav", number, 17000 + 100 * number)
        lines.append(f"{number}.wav,{words(number, 3)}")
    (folder / "speech" / "train" / "metadata.csv").write_text("\n".join(lines))


def make_sounds(folder: Path) -> None:
    from transformers import Wav2Vec2FeatureExtractor, Wav2Vec2Model

    Wav2Vec2Model(tiny_wav2vec(classifier_proj_size=16)).save_pretrained(folder / "model")
    Wav2Vec2FeatureExtractor(return_attention_mask=True).save_pretrained(folder / "model")
    for number in range(24):
        for split in ("train", "validation"):
            record(folder / "sounds" / split / f"kind{number % 3}" / f"{number}.wav", number, 8000)


SPEECH = {
    "model_name_or_path": "tiny/wav2vec2",
    "tokenizer_name_or_path": "letters",
    "dataset_name": "speech",
    "train_split_name": "train",
    "text_column_name": "text",
    "mask_time_prob": 0.0,
    "ctc_loss_reduction": "mean",
    "ctc_zero_infinity": True,
    "length_column_name": "input_length",
    "chars_to_ignore": "!",
}
SCRIPTS = {
    "clm": Script("language-modeling/run_clm.py", make_clm, {"train_file": "train.txt", "block_size": 16}),
    "glue": Script(
        "text-classification/run_glue.py",
        make_glue,
        {"train_file": "train.json", "validation_file": "validation.json", "max_seq_length": 24},
    ),
    "summarization": Script(
        "summarization/run_summarization.py",
        make_summarization,
        {"train_file": "train.json", "max_source_length": 24, "max_target_length": 8, "source_prefix": "sum: "},
    ),
    "classification": Script(
        "text-classification/run_classification.py",
        make_classification,
        {
            "train_file": "train.csv",
            "validation_file": "validation.csv",
            "text_column_names": "sentence1,sentence2",
            "max_seq_length": 24,
            "metric_name": "accuracy",
        },
    ),
    "mlm": Script(
        "language-modeling/run_mlm.py",
        make_mlm,
        {"train_file": "train.txt", "line_by_line": True, "max_seq_length": 16, "mlm_probability": 0.4},
    ),
    "ner": Script("token-classification/run_ner.py", make_ner, {"train_file": "train.json"}),
    "swag": Script("multiple-choice/run_swag.py", make_swag, {"train_file": "train.json", "max_seq_length": 24}),
    "qa": Script(
        "question-answering/run_qa.py", make_qa, {"train_file": "train.json", "max_seq_length": 32, "doc_stride": 8}
    ),
    "translation": Script(
        "translation/run_translation.py",
        make_translation,
        {
            "train_file": "train.json",
            "source_lang": "en",
            "target_lang": "de",
            "max_source_length": 24,
            "max_target_length": 12,
        },
    ),
    "images": Script(
        "image-classification/run_image_classification.py",
        make_images,
        {"train_dir": "images", "remove_unused_columns": False, "label_column_name": "label"},
    ),
    "speech": Script("speech-recognition/run_speech_recognition_ctc.py", make_speech, SPEECH),
    # At stage 3 transformers runs the layers that LayerDrop skips, and uses their outputs.
    "layerdrop": Script(
        "speech-recognition/run_speech_recognition_ctc.py", make_speech, {**SPEECH, "layerdrop": 0.4}, ("z2",)
    ),
    "sounds": Script(
        "audio-classification/run_audio_classification.py",
        make_sounds,
        {"dataset_name": "sounds", "remove_unused_columns": False, "max_length_seconds": 0.4, "attention_mask": False},
    ),
}


@pytest.fixture(scope="module")
def examples() -> Client:
    return client("TRANSFORMERS", "https://github.com/huggingface/transformers", NEEDS)


def prepare(folder: Path, make: Callable[[Path], None], configs: Mapping[str, Any]) -> Path:
    """Write the model and the data of a script, metrics in place of the hub's, and the configurations."""
    import torch

    torch.manual_seed(0)
    make(folder)
    for metric in ("accuracy", "rouge", "wer", "seqeval", "squad", "sacrebleu"):
        (folder / metric).mkdir()
        (folder / metric / f"{metric}.py").write_text(METRIC)
    for config, values in configs.items():
        (folder / f"{config}.json").write_text(json.dumps(values))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folders with the model and the data of each script."""
    configs = {name: {**AUTO, **values} for name, values in CONFIGS.items()}
    return functools.cache(lambda name: prepare(tmp_path_factory.mktemp(name), SCRIPTS[name].make, configs))


def losses(examples: Client, folder: Path, name: str, config: str | None, ranks: int) -> list[float]:
    """Return the losses of the first steps. Without DeepSpeed, several ranks use DistributedDataParallel."""
    script = SCRIPTS[name]
    out = folder / f"{config}-{ranks}"
    options = {
        "model_name_or_path": "model",
        "output_dir": out,
        "do_train": True,
        "per_device_train_batch_size": BATCH // ranks,
        "max_steps": STEPS,
        "learning_rate": 2e-3,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "seed": 1,
        "use_cpu": True,
        **script.options,
    }
    if config is not None:
        options["deepspeed"] = f"{config}.json"
    elif ranks > 1:
        options |= {"ddp_backend": "gloo", "ddp_find_unused_parameters": True}
    spoken = [word for option, value in options.items() for word in (f"--{option}", value)]
    path = examples.folder / "examples" / "pytorch" / script.path
    here = replace(examples, folder=folder)
    # The hub's cache, which holds the model, and the run's own cache are in the folder, so that no files stay behind.
    home = {"HF_HOME": folder / f"home-{config}-{ranks}", "HF_HUB_CACHE": folder / "hub"}
    env = {name: str(value) for name, value in {**home, "NLTK_DATA": folder / "nltk_data"}.items()}
    if config is not None:
        here.run(path, *spoken, ranks=ranks, **env)
    elif ranks > 1:
        launcher = ("-m", "torch.distributed.run", "--nproc-per-node", ranks, "--master-port", free_port())
        here.run(*launcher, path, *spoken, **env)
    else:
        here.run(path, *spoken, **env)
    state = json.loads((out / "trainer_state.json").read_text())
    return [entry["loss"] for entry in state["log_history"] if "loss" in entry]


@pytest.fixture(scope="module")
def plain(examples: Client, folder: Callable[[str], Path]) -> Callable[[str, int], list[float]]:
    """Return the losses without DeepSpeed, by script and number of ranks."""

    @functools.cache
    def get(name: str, ranks: int) -> list[float]:
        return losses(examples, folder(name), name, None, ranks)

    return get


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 1])
@pytest.mark.parametrize(
    ("name", "config"),
    [(name, config) for name, script in SCRIPTS.items() for config in CONFIGS if config.startswith(script.stages)],
)
def test_losses_equal_plain_training(
    examples: Client,
    folder: Callable[[str], Path],
    plain: Callable[[str, int], list[float]],
    name: str,
    config: str,
    ranks: int,
) -> None:
    expected, actual = plain(name, ranks), losses(examples, folder(name), name, config, ranks)
    print(f"{name} {config} on {ranks}: {actual}, plainly {expected}")
    assert len(expected) == STEPS and len(set(expected)) == STEPS
    assert actual == pytest.approx(expected, abs=1.01e-4)
