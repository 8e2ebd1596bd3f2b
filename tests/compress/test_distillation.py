"""Tests of distillation in one process: terms equal plain formulas, for models of transformers too."""

from __future__ import annotations

import copy
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from windlass.base.errors import ConfigError, DataError, ModelError
from windlass.compress.distillation import PROJECTION, Distillation, block_names, check_tokenizers
from windlass.compress.distillation_losses import (
    TopProbabilities,
    attention_divergence,
    hidden_difference,
    logits_divergence,
)
from windlass.compress.engine_steps import check_distillation
from windlass.compress.teacher_cache import TeacherCache
from windlass.config.distillation_section import DistillationConfig
from windlass.parallel.pipeline.pipeline_sequential import PipelineSequential

ROWS, LENGTH, CLASSES = 2, 7, 19
IDS = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) * 5 % CLASSES


def kl(first: Tensor, second: Tensor) -> Tensor:
    """Return KL(first || second) of two tensors of logits at each position."""
    return F.kl_div(second.log_softmax(-1), first.log_softmax(-1), reduction="none", log_target=True).sum(-1)


@pytest.mark.parametrize("reverse", [False, True])
def test_the_divergence_equals_the_formula_and_its_gradient(reverse: bool) -> None:
    torch.manual_seed(0)
    student, teacher = torch.randn(3, 5, CLASSES, requires_grad=True), torch.randn(3, 5, CLASSES)
    twin = student.detach().clone().requires_grad_()
    counted = torch.rand(3, 5) > 0.3
    loss = logits_divergence(student, teacher, temperature=2.5, reverse=reverse, counted=counted)
    pair = (twin / 2.5, teacher / 2.5)
    expected = kl(*(pair if reverse else pair[::-1]))[counted].mean() * 2.5**2
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(student.grad, twin.grad)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("count", [4, CLASSES])
def test_top_probabilities_count_the_others_as_one_class(count: int, reverse: bool) -> None:
    torch.manual_seed(0)
    student, teacher = torch.randn(6, CLASSES, requires_grad=True), torch.randn(6, CLASSES)
    twin = student.detach().clone().requires_grad_()
    values, indices = teacher.log_softmax(-1).topk(count)
    loss = logits_divergence(student, TopProbabilities(values, indices, 1.0, CLASSES), reverse=reverse)

    def merged(logits: Tensor) -> Tensor:
        shares = logits.softmax(-1)
        top = shares.gather(-1, indices)
        return top.log() if count == CLASSES else torch.cat([top, 1 - top.sum(-1, keepdim=True)], -1).log()

    pair = (merged(twin), merged(teacher))
    expected = kl(*(pair if reverse else pair[::-1])).mean()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(student.grad, twin.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("count", [None, 4, CLASSES])
@pytest.mark.parametrize("reverse", [False, True])
def test_excluded_classes_add_nothing(count: int | None, reverse: bool) -> None:
    torch.manual_seed(0)
    student, teacher = torch.randn(6, CLASSES), torch.randn(6, CLASSES)
    for logits in (student, teacher):
        logits[:, 3:] = float("-inf")
    student.requires_grad_()
    twin = student.detach()[:, :3].clone().requires_grad_()
    values, indices = teacher.log_softmax(-1).topk(count or 1)
    other = teacher if count is None else TopProbabilities(values, indices, 1.0, CLASSES)
    loss = logits_divergence(student, other, reverse=reverse)
    pair = (twin, teacher[:, :3])
    expected = kl(*(pair if reverse else pair[::-1])).mean()
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    assert student.grad is not None
    torch.testing.assert_close(student.grad[:, :3], twin.grad)
    assert not student.grad[:, 3:].any()


@pytest.mark.parametrize("kind", ["logits", "top", "hidden", "attention"])
def test_positions_that_do_not_count_may_hold_nan(kind: str) -> None:
    torch.manual_seed(2)
    student, teacher = torch.randn(2, 3, 5, 5).softmax(-1), torch.randn(2, 3, 5, 5).softmax(-1)
    counted = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    if kind != "attention":
        student, teacher = student[:, 0], teacher[:, 0]
    found = []
    for filled in (0.2, float("nan")):
        own, other = student.clone(), teacher.clone()
        for one in (own, other):
            (one.movedim(1, 2) if kind == "attention" else one)[0, :2] = filled
        own.requires_grad_()
        if kind == "hidden":
            loss = hidden_difference(own, other, counted)
        elif kind == "attention":
            loss = attention_divergence(own, other, counted)
        elif kind == "top":
            values, indices = other.log_softmax(-1).topk(2)
            loss = logits_divergence(own, TopProbabilities(values, indices, 1.0, 5), counted=counted)
        else:
            loss = logits_divergence(own, other, counted=counted)
        loss.backward()
        found.append((loss.detach(), own.grad))
    (loss, grad), (other_loss, other_grad) = found
    assert float(loss) > 0 and torch.equal(loss, other_loss) and torch.equal(grad, other_grad)


def llama(layers: int, width: int = 16, seed: int = 0, **more: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    settings = {
        "vocab_size": CLASSES,
        "hidden_size": width,
        "intermediate_size": 24,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "attn_implementation": "eager",
    } | more
    return LlamaForCausalLM(LlamaConfig(**settings))


def grads(model: nn.Module) -> dict[str, Tensor]:
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def test_all_terms_of_a_language_model_equal_plain_pytorch() -> None:
    student, teacher = llama(2), llama(4, width=24, seed=1)
    mask = torch.ones_like(IDS)
    mask[0, -2:] = 0
    batch = {"input_ids": IDS, "attention_mask": mask, "labels": IDS.masked_fill(mask == 0, -100)}
    distillation = Distillation(teacher, task=0.3, hidden=0.7, attention=0.9, temperature=2.0)
    distillation.attach(student)
    twin = copy.deepcopy(student)
    distillation.detach(twin)
    projection = nn.Linear(16, 24, bias=False)
    projection.load_state_dict(getattr(student, PROJECTION).state_dict())
    loss = student(**batch).loss
    loss.backward()

    ask = {"output_hidden_states": True, "output_attentions": True}
    own = twin(**batch, **ask)
    with torch.no_grad():
        other = teacher(input_ids=IDS, attention_mask=mask, **ask)
    counted = mask.bool()
    blocks: list[dict[int, Tensor]] = [{}, {}]
    for found, model in zip(blocks, (twin, teacher), strict=True):  # not `hidden_states`, whose last is after the norm
        for place, layer in enumerate(model.model.layers):
            layer.register_forward_hook(lambda m, a, out, place=place, found=found: found.__setitem__(place, out))
    own = twin(**batch, **ask)
    with torch.no_grad():
        teacher(input_ids=IDS, attention_mask=mask)
    expected = 0.3 * own.loss + 4 * kl(other.logits / 2, own.logits / 2)[counted].mean()
    for mine, its in ((0, 1), (1, 3)):
        difference = (projection(blocks[0][mine]) - blocks[1][its]).square().mean(-1)[counted].mean()
        maps = [one.clamp(min=1e-12) for one in (other.attentions[its], own.attentions[mine])]
        divergence = (other.attentions[its] * (maps[0].log() - maps[1].log())).sum(-1).mean(1)[counted].mean()
        expected = expected + (0.7 * difference + 0.9 * divergence) / 2
    torch.testing.assert_close(loss, expected)
    expected.backward()
    wanted = grads(twin) | {f"{PROJECTION}.weight": projection.weight.grad}
    found = grads(student)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)
    assert not grads(teacher) and not any(one.requires_grad for one in teacher.parameters())
    student.eval()
    torch.testing.assert_close(student(**batch).loss, twin.eval()(**batch).loss)
    distillation.detach(student)
    assert list(student.state_dict()) == list(llama(2).state_dict())


def test_checkpointed_blocks_pass_the_gradients_of_attention_maps() -> None:
    found = []
    for options in (None, {"use_reentrant": False}, {"use_reentrant": True}):
        student = llama(2).train()
        if options is not None:
            getattr(student, "activation_checkpointing_enable", student.gradient_checkpointing_enable)(options)
        Distillation(llama(2, seed=1), logits=0.0, attention=1.0).attach(student)
        if options == {"use_reentrant": True}:
            student.get_input_embeddings().requires_grad_(False)
            student.enable_input_require_grads()
            with pytest.raises(ModelError, match=r"attention compares .*'model.layers.\d', .* use_reentrant=False"):
                student(input_ids=IDS)
            student.model.layers.requires_grad_(False)  # frozen blocks have no gradients to lose
            student(input_ids=IDS)
        else:
            student(input_ids=IDS).loss.backward()
            found.append(grads(student))
    torch.testing.assert_close(found[1], found[0])


def test_a_model_that_is_deeper_than_its_teacher_begins_with_its_first_block() -> None:
    student, teacher = llama(4), llama(2, seed=1)
    Distillation(teacher, logits=0.0, hidden=1.0).attach(student)
    seen: dict[Any, Tensor] = {}
    for model in (student, teacher):
        for place, layer in enumerate(model.model.layers):
            layer.register_forward_hook(lambda m, a, out, key=(model, place): seen.__setitem__(key, out))
    loss = student(input_ids=IDS).loss
    each = [(seen[student, mine] - seen[teacher, its]).square().mean() for mine, its in enumerate((0, 0, 1, 1))]
    torch.testing.assert_close(loss, torch.stack(each).mean())


def test_a_classifier_and_named_layers() -> None:
    from transformers import BertConfig, BertForSequenceClassification

    def bert(layers: int, seed: int) -> Any:
        torch.manual_seed(seed)
        config = BertConfig(
            vocab_size=CLASSES,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=layers,
            num_attention_heads=2,
            num_labels=3,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        return BertForSequenceClassification(config)

    student, teacher = bert(1, 0), bert(2, 1)
    layers = {"bert.embeddings": "bert.embeddings", 0: 1}
    Distillation(teacher, hidden=1.0, layers=layers, divergence="reverse").attach(student)
    loss = student(input_ids=IDS, labels=torch.tensor([0, 2])).loss
    own, other = (one(input_ids=IDS, output_hidden_states=True) for one in (student.eval(), teacher))
    pairs = ((0, 0), (1, 2))
    differences = [F.mse_loss(own.hidden_states[a], other.hidden_states[b]) for a, b in pairs]
    torch.testing.assert_close(loss, kl(own.logits, other.logits).mean() + sum(differences) / 2)


@pytest.mark.parametrize("has_mask", [False, True])
@pytest.mark.parametrize("term", ["hidden", "attention"])
def test_padding_of_a_classifier_with_a_decoder_does_not_count(term: str, has_mask: bool) -> None:
    from transformers import BartConfig, BartForSequenceClassification

    def bart(seed: int) -> Any:
        torch.manual_seed(seed)
        config = BartConfig(
            **{"vocab_size": CLASSES, "d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "dropout": 0.0},
            **{"encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "encoder_attention_heads": 2, "decoder_attention_heads": 2},
            **{"pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2, "num_labels": 3},
            attn_implementation="eager",
        )
        return BartForSequenceClassification(config)

    student, teacher = bart(0), bart(1)
    seen: dict[Any, Tensor] = {}
    ids = torch.tensor([[4, 5, 6, 2], [7, 2, 0, 0]])
    batch = {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": torch.tensor([0, 2])}
    real = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])  # a decoder's ids are those of the encoder behind its first token
    if has_mask:
        real = batch["decoder_attention_mask"] = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
    name = "model.decoder.layers.0"
    options: dict[str, Any] = {"logits": 0.0, "hidden": 0.0, term: 1.0}
    Distillation(teacher, layers={name: name}, **options).attach(student)
    for model in (student, teacher):
        layer = model.model.decoder.layers[0]
        layer.register_forward_hook(lambda m, a, out, key=model: seen.__setitem__((key, "hidden"), out))
        layer.self_attn.register_forward_hook(lambda m, a, out, key=model: seen.__setitem__((key, "attention"), out[1]))
    loss = student(**batch).loss
    own, other = seen[student, term], seen[teacher, term]
    expected = (hidden_difference if term == "hidden" else attention_divergence)(own, other, real)
    torch.testing.assert_close(loss, expected)
    assert not torch.allclose(loss, (hidden_difference if term == "hidden" else attention_divergence)(own, other))


def test_only_labelled_tokens_count_when_asked() -> None:
    student, teacher = llama(1), llama(1, seed=1)
    labels = IDS.clone()
    labels[:, :4] = -100
    Distillation(teacher, tokens="labelled").attach(student)
    loss = student(input_ids=IDS, labels=labels).loss
    own, other = student.eval()(input_ids=IDS).logits, teacher(input_ids=IDS).logits
    torch.testing.assert_close(loss, kl(other, own)[:, 3:-1].mean())


@pytest.mark.parametrize("makes_ids", [False, True])
@pytest.mark.parametrize("tokens", ["all", "labelled"])
def test_an_encoder_and_its_decoder_have_positions_of_their_own(tokens: str, makes_ids: bool, tmp_path: Path) -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    def t5(layers: int) -> Any:
        torch.manual_seed(layers)
        sizes = {"vocab_size": CLASSES, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": layers, "num_heads": 2}
        return T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0))

    student, teacher = t5(1), t5(2)
    with pytest.raises(ConfigError, match="also depend on the decoder's ids; leave out the cache"):
        Distillation(teacher, cache=TeacherCache(tmp_path)).attach(student)
    labels = IDS[:, :5].clone()
    labels[0, 3:] = -100
    mask = torch.ones_like(IDS)
    mask[1, 4:] = 0
    batch = {"input_ids": IDS, "attention_mask": mask, "labels": labels}
    if not makes_ids:
        batch["decoder_input_ids"] = student.prepare_decoder_input_ids_from_labels(labels)
    seen: dict[Any, Tensor] = {}
    for model in (student, teacher):
        model.encoder.block[-1].register_forward_hook(lambda m, a, out, key=model: seen.__setitem__(key, out[0]))
    Distillation(teacher, hidden=1.0, tokens=tokens).attach(student)
    loss = student.train()(**batch).loss
    own, other = student.eval()(**batch).logits, teacher(**batch).logits
    counted = labels != -100 if tokens == "labelled" else torch.ones_like(labels, dtype=torch.bool)
    hidden = (seen[student] - seen[teacher]).square().mean(-1)[mask > 0].mean()
    torch.testing.assert_close(loss, kl(other, own)[counted].mean() + hidden)


class Counted(nn.Module):
    """Teacher that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.calls = nn.Embedding(CLASSES, CLASSES), 0

    def forward(self, input_ids: Tensor) -> Tensor:
        self.calls += 1
        return self.table(input_ids)


class Student(Counted):
    """Model that returns logits, and None as its loss."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor | None]:
        return {"logits": self.table(input_ids), "loss": None}


def test_a_cache_computes_each_sequence_once(tmp_path: Path) -> None:
    torch.manual_seed(0)
    teacher, student = Counted(), Student()
    cache = TeacherCache(tmp_path, top_k=5, teacher="one")
    distillation = Distillation(teacher, cache=cache)
    distillation.attach(student)
    first = student(input_ids=IDS)["loss"]
    assert torch.equal(student(input_ids=IDS)["loss"], first) and teacher.calls == 1 and len(cache) == ROWS
    values, indices = teacher(IDS).log_softmax(-1).topk(5)
    top = TopProbabilities(values.half(), indices, 1.0, CLASSES)
    assert torch.equal(first, logits_divergence(student.table(IDS), top))
    distillation.detach(student)
    size = sum(file.stat().st_size for file in tmp_path.glob("*.bin"))
    assert size == ROWS * (20 + LENGTH * 5 * (2 + 2))

    with open(tmp_path / "rank0.bin", "ab") as file:
        file.write(b"half a record")
    alone = Distillation(cache=TeacherCache(tmp_path, top_k=5, teacher="one", rank=1))  # no teacher in memory
    alone.attach(student)
    torch.testing.assert_close(student(input_ids=IDS.flip(0))["loss"], first, rtol=1e-6, atol=0.0)  # another order
    with pytest.raises(DataError, match="lacks a sequence of this batch; give a teacher"):
        student(input_ids=IDS + 1)
    with pytest.raises(ConfigError, match="was made with top_k 5, not 6"):
        TeacherCache(tmp_path, top_k=6, teacher="one")
    with pytest.raises(ConfigError, match="was made with teacher 'one', not 'two'"):
        TeacherCache(tmp_path, top_k=5, teacher="two")
    with open(tmp_path / "rank0.bin", "r+b") as file:
        file.seek(30)
        file.write(b"\xff\xff")
    with pytest.raises(DataError, match="record 0 of .*rank0.bin is damaged"):
        student(input_ids=IDS)
    with pytest.raises(ConfigError, match="holds logits, not the hidden states"):
        Distillation(teacher, cache=cache, hidden=1.0)
    with pytest.raises(ConfigError, match=r"temperature is 2, but the cache .* holds distributions at temperature 1;"):
        Distillation(teacher, cache=cache, temperature=2.0)
    with pytest.raises(ConfigError, match="temperature is 2, but the teacher's probabilities are of temperature 1"):
        logits_divergence(student.table(IDS), top, temperature=2.0)
    with pytest.raises(DataError, match="has sequences of 7 tokens and 19 classes, not of 6 and 19"):
        cache.add(IDS[:, :-1], torch.zeros(ROWS, LENGTH - 1, CLASSES))


def test_ranks_with_the_same_sequences_store_them_once(tmp_path: Path) -> None:
    torch.manual_seed(0)
    ids, logits = torch.randint(0, 50, (4, 6)), torch.randn(4, 6, 50)
    one, two, reader = (TeacherCache(tmp_path, top_k=5, rank=rank) for rank in range(3))
    one.add(ids[[0, 1, 1]], logits[[0, 1, 1]])
    assert two.has(ids[:2]) and not two.has(ids)  # written after `two` was opened
    for cache in (two, one):
        cache.add(ids[1:3], logits[1:3])
    two.add(ids, logits)
    records = {path.name: path.stat().st_size // (20 + 6 * 5 * 4) for path in tmp_path.glob("rank*.bin")}
    assert records == {"rank0.bin": 2, "rank1.bin": 2} and one.has(ids)
    assert torch.equal(one.read(ids).values, two.read(ids).values)
    assert torch.equal(reader.read(ids).values, one.read(ids).values)  # all were written after `reader` was opened


def test_cache_after_a_failed_write_has_no_incomplete_record(tmp_path: Path) -> None:
    torch.manual_seed(0)
    ids, logits = torch.randint(0, 50, (4, 6)), torch.randn(4, 6, 50)
    cache = TeacherCache(tmp_path, top_k=5)
    cache.add(ids[:1], logits[:1])
    size = (tmp_path / "rank0.bin").stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + size // 2, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            cache.add(ids[1:3], logits[1:3])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not cache.has(ids[1:2])
    cache.add(ids[2:], logits[2:])
    for one in (cache, TeacherCache(tmp_path, top_k=5)):
        assert len(one) == 3
        expected = torch.log_softmax(logits[2:], -1).topk(5)
        found = one.read(ids[2:])
        torch.testing.assert_close(found.values, expected.values, atol=5e-3, rtol=0)
        assert torch.equal(found.indices, expected.indices)


def test_bad_input_names_the_key() -> None:
    from tokenizers import Tokenizer, models

    with pytest.raises(ConfigError, match="temperature"):
        Distillation(llama(1), temperature=0.0)
    with pytest.raises(ConfigError, match="needs a teacher, or a cache"):
        Distillation()
    with pytest.raises(ConfigError, match="the model has 19 tokens or classes and the teacher 20"):
        Distillation(llama(1, vocab_size=20)).attach(llama(1))
    with pytest.raises(ConfigError, match="layers has block 3 of the teacher; write a number from -1 to 0"):
        Distillation(llama(1), hidden=1.0, layers={0: 3}).attach(llama(1))
    with pytest.raises(ConfigError, match="layers has 'norm', which the model lacks"):
        Distillation(llama(1), hidden=1.0, layers={"norm": "model.norm"}).attach(llama(1))
    student = Distillation(llama(1, num_attention_heads=4), attention=1.0).attach(llama(1))
    with pytest.raises(ModelError, match=r"\(2, 2, 7, 7\), those of the teacher's 'model.layers.0' \(2, 4, 7, 7\)"):
        student(input_ids=IDS)
    plain = {"attn_implementation": "sdpa"}
    with pytest.raises(ModelError, match="no module of distillation.layers returns any"):
        Distillation(llama(1, **plain), attention=1.0).attach(llama(1, **plain))(input_ids=IDS)
    with pytest.raises(ModelError, match="task is 1.0, but the model's output has no loss"):
        Distillation(Counted(), task=1).attach(Student())(input_ids=IDS)
    with pytest.raises(ConfigError, match="has a distillation already"):
        Distillation(llama(1)).attach(student)
    with pytest.raises(ConfigError, match="sp is 2; set parallel.sp to 1"):
        check_distillation(student, DistillationConfig(), 2)
    sequential = Distillation(llama(1)).attach(PipelineSequential([nn.Linear(2, 2)]))
    with pytest.raises(ConfigError, match="not a PipelineSequential; pass the model itself"):
        check_distillation(sequential, DistillationConfig(), 1)
    with pytest.raises(ConfigError, match="the model has no teacher"):
        check_distillation(llama(1), DistillationConfig(temperature=2.0), 1)
    own, other = (Tokenizer(models.WordLevel({"a": a, "b": 1 - a}, unk_token="a")) for a in (0, 1))
    check_tokenizers(own, own)
    with pytest.raises(ConfigError, match="token 'a' has id 0 in the model's and 1 in the teacher's"):
        check_tokenizers(own, other)
    with pytest.raises(ConfigError, match="has no list of blocks"):
        block_names(nn.Linear(2, 2))
