"""Distillation: a model that is trained against the outputs of a teacher.

[Note: distillation in the forward] Hooks of the trained model run the teacher before the forward, and replace the
output's `loss` after it. So the training loop stays as it is, every stage of ZeRO runs one forward with one loss, and
the script chooses the teacher: a module, or an engine that shards or offloads it.

[Note: distillation over stages] In a pipeline each rank runs the teacher for its stages: the last stage compares
logits; each stage compares the hidden states and attention maps of its layers, and passes the terms of the loss on to
the last stage.
A teacher that runs on all ranks together, in an engine, cannot run inside of stages, which are at different
micro-batches: `run_ahead` runs it on all micro-batches of a step before the first stage.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from windlass.base.errors import ConfigError, ModelError
from windlass.comm.rank_group import world_group
from windlass.compress.distillation_losses import (
    TopProbabilities,
    attention_divergence,
    hidden_difference,
    logits_divergence,
)
from windlass.compress.teacher_cache import TeacherCache
from windlass.config.distillation_section import DistillationConfig
from windlass.parallel.pipeline.apply_pipeline_parallel import get_pipeline_stages
from windlass.parallel.pipeline.running_stage import get_running_stage
from windlass.parallel.pipeline.staged_model import StagedModel
from windlass.parallel.tensor.linear_layers import is_stub
from windlass.parallel.tensor.output_head_sharding import get_sharded_vocabulary

ATTACHED = "_windlass_distillation"  # attribute of a trained model that holds its `Distillation`
PROJECTION = "distillation_projection"  # submodule that projects hidden states to the teacher's size
IGNORED_LABEL = -100


@dataclass
class _Seen:
    """Outputs of a model in one forward."""

    logits: Tensor | TopProbabilities | None = None
    hidden: dict[str, Tensor] = field(default_factory=dict)
    attention: dict[str, Tensor] = field(default_factory=dict)
    ungraded: set[tuple[str, str]] = field(default_factory=set)  # (term, module) of tensors without gradients
    pairs: int = 0  # number of compared modules, on all stages of a pipeline
    attention_pairs: int = 0  # number of compared modules with attention maps


class Distillation:
    """Loss of a model against a frozen teacher.

    `attach` it to the model before `initialize`: then each forward in training mode runs the teacher on the same
    arguments without `labels`, and the output's `loss` is the distillation loss. In eval mode or under `no_grad` the
    model runs as before. See [Note: distillation in the forward].

    Args:
        teacher: module, or engine that `initialize` made without an optimizer; None with a complete cache. Its
            parameters are frozen, and it is set to eval mode.
        cache: cache of the teacher's largest probabilities; None: the teacher runs in each forward.
        options: keys of the section `distillation`; `layers` may name blocks by integers.

    Raises:
        ConfigError: an option is wrong, there is neither a teacher nor a cache, or the options do not fit the cache.
        ModelError: the teacher's engine has an optimizer.
    """

    def __init__(self, teacher: Any = None, *, cache: TeacherCache | None = None, **options: Any) -> None:
        if isinstance(options.get("layers"), Mapping):
            options["layers"] = {str(own): str(other) for own, other in options["layers"].items()}
        try:
            self.options = DistillationConfig.model_validate(options)
        except ValueError as error:
            raise ConfigError(f"distillation: {error}") from error
        if teacher is None and cache is None:
            raise ConfigError("distillation needs a teacher, or a cache of its logits; pass one")
        compares_layers = bool(self.options.hidden or self.options.attention)
        if cache is not None and compares_layers:
            raise ConfigError(
                "distillation.cache holds logits, not the hidden states and attention maps that hidden "
                f"{self.options.hidden} and attention {self.options.attention} need; set both to 0, or leave out the "
                "cache"
            )
        if cache is not None and cache.temperature != self.options.temperature:
            raise ConfigError(
                f"distillation.temperature is {self.options.temperature:g}, but the cache {cache.folder} holds "
                f"distributions at temperature {cache.temperature:g}; pass TeacherCache(..., temperature="
                f"{self.options.temperature:g}) with another folder, or write temperature {cache.temperature:g}"
            )
        if getattr(teacher, "optimizer", None) is not None:
            raise ModelError("the teacher's engine has an optimizer; build it without one, since a teacher is frozen")
        self.teacher, self.cache = teacher, cache
        if isinstance(teacher, nn.Module):
            teacher.eval()
            teacher.requires_grad_(False)
        self._wanted: _Seen | None = None  # outputs of the teacher for the running forward
        self._own = _Seen()
        self._kept_pairs: dict[str, str] | None = None  # compared modules; None: chosen in each forward
        self._ahead: list[_Seen] = []  # outputs of the teacher for the micro-batches of a pipeline's step
        self._next: dict[int, int] = {}  # index of the next micro-batch of each stage
        self._handles: list[Any] = []
        self._before_hook, self._after_hook = (torch.compiler.disable(one) for one in (self._before, self._after))

    def __deepcopy__(self, memo: dict[int, Any]) -> Distillation:
        return self  # a copy of the trained model has the same teacher

    def attach(self, student: nn.Module) -> nn.Module:
        """Connect the loss to a model, in place. Call it before `initialize`, since it adds a linear projection to the
        model if hidden states of different sizes are compared.

        Raises:
            ConfigError: the model has another vocabulary than the teacher, `layers` name a module that the model
                or the teacher lacks, the model is connected already, or it has a decoder behind an encoder and there is
                a cache.
        """
        if attached_distillation(student) is not None:
            raise ConfigError("the model has a distillation already; call its detach(model) first")
        if self.cache is not None and _has_encoder_and_decoder(student):
            raise ConfigError(
                f"distillation.cache finds logits by input_ids, and those of a {type(student).__name__} also depend on "
                "the decoder's ids; leave out the cache"
            )
        self._kept_pairs = None
        teacher = self._teacher_module()
        if teacher is not None:
            check_vocabularies(student, teacher)
            if self.options.hidden or self.options.attention:
                self._pairs(student)
                own, other = _width(student), _width(teacher)
                if self.options.hidden and own and other and own != other:
                    student.add_module(PROJECTION, nn.Linear(own, other, bias=False))
        student.__dict__[ATTACHED] = self
        student.register_forward_pre_hook(self._before_hook, with_kwargs=True)
        student.register_forward_hook(self._after_hook, with_kwargs=True)
        return student

    def detach(self, student: nn.Module) -> nn.Module:
        """Undo `attach` on the model or on a copy of it."""
        for hooks, flags in (
            (student._forward_pre_hooks, student._forward_pre_hooks_with_kwargs),
            (student._forward_hooks, student._forward_hooks_with_kwargs),
        ):
            for key in [key for key, hook in hooks.items() if hook in (self._before_hook, self._after_hook)]:
                del hooks[key]
                flags.pop(key, None)
        student.__dict__.pop(ATTACHED, None)
        if hasattr(student, PROJECTION):
            delattr(student, PROJECTION)
        return student

    def _teacher_module(self) -> nn.Module | None:
        inner = getattr(self.teacher, "module", self.teacher)  # an engine wraps its module
        return inner if isinstance(inner, nn.Module) else None

    def _before(self, student: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._wanted = None
        self._drop_handles()
        if not (student.training and torch.is_grad_enabled()):
            return
        stage, pairs = get_running_stage(), self._local_pairs(student)
        if stage is not None and not stage.is_last and not pairs:
            return
        with torch.no_grad():
            if stage is not None and self.runs_ahead:
                self._wanted = self._take_ahead(student, stage.number)
            else:
                given = (args, kwargs) if stage is None else ((), stage.arguments)
                self._wanted = self._teach(student, given[0], _arguments_of_teacher(student, given[1]))
        if pairs:
            self._own = _Seen()
            self._handles = self._capture(student, list(pairs), self._own)

    @property
    def runs_ahead(self) -> bool:
        """True if the teacher runs on all ranks together, so that a pipeline needs `run_ahead`."""
        return self.teacher is not None and (self.cache is not None or self.teacher is not self._teacher_module())

    def run_ahead(self, student: nn.Module, batches: Sequence[Any], to_device: Callable[[Any], Any]) -> None:
        """Run the teacher on the micro-batches of a pipeline's step, before its first stage. Collective.

        Args:
            batches: micro-batches as the model's stages get them: keywords, a tuple of arguments, or one argument.
            to_device: moves a micro-batch to the device of the model.
        """
        self._ahead, self._next = [], {}
        stages = get_pipeline_stages(student)
        assert isinstance(stages, StagedModel), "a pipeline of a model with a teacher"
        is_last = stages.total_stages - 1 in stages.stages
        for batch in map(to_device, batches):
            with torch.no_grad():
                given = _arguments_of_teacher(student, stages.named_arguments(batch))
                seen = self._teach(student, (), given, reads_cache=is_last)
            local = set(self._local_pairs(student).values())
            seen.hidden = {name: value for name, value in seen.hidden.items() if name in local}
            seen.attention = {name: value for name, value in seen.attention.items() if name in local}
            if not is_last:
                seen.logits = None  # only the last stage compares logits
            self._ahead.append(seen)

    def _take_ahead(self, student: nn.Module, stage: int) -> _Seen:
        """Return the outputs of the teacher for the next micro-batch of a stage. The rank's last stage frees them."""
        number = self._next.get(stage, 0)
        self._next[stage] = number + 1
        stages, found = get_pipeline_stages(student), self._ahead[number]
        if stages is not None and stage == stages.stages[-1]:
            self._ahead[number] = _Seen()
        return found

    def _teach(
        self, student: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, reads_cache: bool = True
    ) -> _Seen:
        if self.cache is None:
            return self._run_teacher(student, args, kwargs)
        ids = kwargs.get("input_ids", args[0] if args else None)
        if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point():
            raise ModelError(
                "a cache of a teacher finds sequences by token ids [rows, length]; pass input_ids, or no cache"
            )
        missing = torch.tensor([not self.cache.has(ids)], dtype=torch.int32)
        if self.teacher is not None and dist.is_initialized():
            # If one rank must run the teacher, all ranks run it, since it may be sharded over them.
            world_group().all_reduce(missing, dist.ReduceOp.MAX)
        if self.teacher is not None and bool(missing):
            logits = self._run_teacher(student, args, kwargs).logits
            assert isinstance(logits, Tensor)
            self.cache.add(ids, logits)
        return _Seen(self.cache.read(ids) if reads_cache else None)

    def _run_teacher(self, student: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Seen:
        seen, handles, teacher = _Seen(), [], self._teacher_module()
        pairs: dict[str, str] = {}
        if self.options.hidden or self.options.attention:
            assert teacher is not None
            pairs = self._pairs(student)
            handles = self._capture(teacher, list(pairs.values()), seen)
        try:
            seen.logits = _logits(self.teacher(*args, **kwargs), "teacher")
        finally:
            for handle in handles:
                handle.remove()
        seen.pairs, seen.attention_pairs = len(pairs), sum(other in seen.attention for other in pairs.values())
        return seen

    def _after(self, student: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        wanted, self._wanted = self._wanted, None
        self._drop_handles()
        if wanted is None:
            return None
        own, self._own = self._own, _Seen()
        stage = get_running_stage()
        if stage is not None and not stage.is_last:
            for term in self._layer_terms(student, own, wanted, stage.arguments, _has_token_labels(stage.arguments)):
                stage.add_term(term)
            return None
        own.logits = _logits(output, "model")
        vocabulary = get_sharded_vocabulary(student)
        if vocabulary is not None and vocabulary.is_local_shard(own.logits):  # only one rank's part of the vocabulary
            own.logits = vocabulary.gather_logits(own.logits)
        loss = self._loss(student, own, wanted, kwargs)
        if stage is not None and stage.terms is not None:
            loss = loss + stage.terms
        if self.options.task:
            task = _get(output, "loss")
            if task is None:
                raise ModelError(
                    f"distillation.task is {self.options.task}, but the model's output has no loss; pass labels, or "
                    "set task to 0"
                )
            loss = loss + self.options.task * task
        return _with_loss(output, loss)

    def _loss(self, student: nn.Module, own: _Seen, wanted: _Seen, kwargs: Mapping[str, Any]) -> Tensor:
        options, logits = self.options, own.logits
        assert isinstance(logits, Tensor)
        terms: list[Tensor] = []
        if options.logits:
            assert wanted.logits is not None
            classes = wanted.logits.shape[-1] if isinstance(wanted.logits, Tensor) else wanted.logits.classes
            if logits.shape[-1] != classes:
                raise _other_vocabulary(logits.shape[-1], classes)
            terms.append(
                options.logits
                * logits_divergence(
                    logits,
                    wanted.logits,
                    temperature=options.temperature,
                    reverse=options.divergence == "reverse",
                    counted=_counted(student, logits.dim() == 3, kwargs, options.tokens),
                )
            )
        terms += self._layer_terms(student, own, wanted, kwargs, logits.dim() == 3)
        return torch.stack(terms).sum() if terms else logits.new_zeros((), dtype=torch.float32)

    def _layer_terms(
        self, student: nn.Module, own: _Seen, wanted: _Seen, kwargs: Mapping[str, Any], has_tokens: bool
    ) -> list[Tensor]:
        """Return the loss terms for the hidden states and attention maps of this stage's compared modules, if any."""
        options, terms = self.options, []
        if not (options.hidden or options.attention):
            return []
        counted = _counted(student, has_tokens, kwargs, options.tokens)
        pairs = self._local_pairs(student)

        def positions(name: str) -> Tensor | None:
            """Return the mask of the positions of a module that count; None: all."""
            if _has_encoder_and_decoder(student):
                if "decoder" not in name.split("."):
                    return kwargs.get("attention_mask")
                return counted if has_tokens else _mask_of_decoder(kwargs)
            return kwargs.get("attention_mask") if counted is None else counted

        _check_gradients(student, own)
        if options.hidden:
            each = [self._hidden_term(student, own, wanted, pair, positions(pair[0])) for pair in pairs.items()]
            terms += [options.hidden * torch.stack(each).sum() / wanted.pairs] if each else []
        if options.attention:
            if not wanted.attention_pairs:
                raise ModelError(
                    "distillation.attention needs attention maps, and no module of distillation.layers returns any; "
                    'load both models with attn_implementation="eager"'
                )
            each = [
                _attention_term(own, wanted, pair, positions(pair[0]))
                for pair in pairs.items()
                if _is_block(pair, wanted)
            ]
            terms += [options.attention * torch.stack(each).sum() / wanted.attention_pairs] if each else []
        return terms

    def _hidden_term(
        self, student: nn.Module, own: _Seen, wanted: _Seen, pair: tuple[str, str], counted: Tensor | None
    ) -> Tensor:
        mine, other = own.hidden[pair[0]], wanted.hidden[pair[1]]
        projection = getattr(student, PROJECTION, None)
        if projection is not None:
            mine = projection(mine)
        if mine.shape != other.shape:
            raise ModelError(
                f"hidden states of {pair[0]!r} have shape {tuple(mine.shape)}, those of the teacher's {pair[1]!r} "
                f"{tuple(other.shape)}; name other modules in distillation.layers, or set hidden to 0"
            )
        return hidden_difference(mine, other, _positions(counted, mine))

    def keep_pairs(self, student: nn.Module) -> None:
        """Choose the compared modules of a model once, before a pipeline removes the layers of other ranks from it."""
        self._kept_pairs = None
        if self.options.hidden or self.options.attention:
            self._kept_pairs = self._pairs(student)

    def _local_pairs(self, student: nn.Module) -> dict[str, str]:
        """Return the pairs of `_pairs` whose module of the trained model is on this rank; while a pipeline stage runs,
        only those of this stage. Empty if no term compares modules."""
        if not (self.options.hidden or self.options.attention):
            return {}
        return {own: other for own, other in self._pairs(student).items() if not _is_in_stub(student, own)}

    def _pairs(self, student: nn.Module) -> dict[str, str]:
        """Return the compared modules: names in the teacher, by their names in the trained model."""
        if self._kept_pairs is not None:
            return self._kept_pairs
        teacher = self._teacher_module()
        assert teacher is not None
        layers = self.options.layers
        if isinstance(layers, str):
            own, other = block_names(student, "model"), block_names(teacher, "teacher")
            places = [len(own) - 1] if layers == "last" else range(len(own))
            # first blocks of a model that is deeper than its teacher are compared with the teacher's first block
            return {own[place]: other[max(round((place + 1) * len(other) / len(own)) - 1, 0)] for place in places}
        return {_module_name(student, a, "model"): _module_name(teacher, b, "teacher") for a, b in layers.items()}

    def _capture(self, model: nn.Module, names: list[str], seen: _Seen) -> list[Any]:
        """Record the outputs of modules, and attention maps inside of them, in `seen` until the returned handles are
        removed."""
        handles = []
        for name in names:
            module = model.get_submodule(name)
            handles.append(module.register_forward_hook(_record_hidden(name, seen)))
            if self.options.attention:
                inner = [one for one in module.modules() if any(True for _ in one.children())]
                handles += [one.register_forward_hook(_record_attention(name, seen)) for one in inner]
        return handles

    def _drop_handles(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []


def attached_distillation(model: nn.Module) -> Distillation | None:
    """Return the `Distillation` that is attached to a model; None if there is none."""
    found = model.__dict__.get(ATTACHED)
    return found if isinstance(found, Distillation) else None


def check_vocabularies(student: nn.Module, teacher: nn.Module) -> None:
    """Check that two models have vocabularies of one size, by their configurations.

    Raises:
        ConfigError: the vocabularies differ in size.
    """
    sizes = [getattr(getattr(one, "config", None), "vocab_size", None) for one in (student, teacher)]
    if all(isinstance(size, int) for size in sizes) and sizes[0] != sizes[1]:
        raise _other_vocabulary(*sizes)


def check_tokenizers(student: Any, teacher: Any) -> None:
    """Check that two tokenizers, of the packages transformers or tokenizers, assign the same ids to a text.

    Vocabularies, rules that join or choose tokens, normalizers, pre-tokenizers and added tokens are compared; decoders,
    padding, truncation, and special tokens around a text are not. Python tokenizers of transformers have only a
    vocabulary to compare.

    Raises:
        ConfigError: the ids differ; the message names a token or a part.
    """
    own, other = (dict(one.get_vocab()) for one in (student, teacher))
    if own != other:
        token = min({*own, *other}, key=lambda one: (own.get(one) == other.get(one), one))
        reason = f"token {token!r} has id {own.get(token)} in the model's and {other.get(token)} in the teacher's"
    else:
        mine, theirs = (_encoding_parts(one) for one in (student, teacher))
        if mine is None or theirs is None or mine == theirs:
            return
        part = next(name for name in sorted({*mine, *theirs}) if mine.get(name) != theirs.get(name))
        difference = _first_difference(mine.get(part), theirs.get(part))
        reason = f"the vocabularies are equal, but {part} differs: {difference}"
    raise ConfigError(
        f"the teacher has another tokenizer: {reason}; use a teacher that was trained with the model's tokenizer"
    )


def _encoding_parts(tokenizer: Any) -> dict[str, Any] | None:
    """Return the parts of a tokenizer that determine the ids of a text, as JSON data; None for a tokenizer that is not
    of the package tokenizers."""
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not hasattr(backend, "to_str"):
        return None
    found = json.loads(backend.to_str())
    model = {name: value for name, value in found["model"].items() if value not in (None, "", False)}
    added = {
        token["content"]: {name: token[name] for name in ("single_word", "lstrip", "rstrip", "normalized")}
        for token in found["added_tokens"]
    }
    return {
        **{f"model.{name}": value for name, value in model.items()},
        "normalizer": found["normalizer"],
        "pre_tokenizer": _without_offsets(found["pre_tokenizer"]),
        "added_tokens": added,
    }


def _without_offsets(value: Any) -> Any:
    """Return JSON data without the entries that change only the offsets of tokens in the text."""
    if isinstance(value, dict):
        return {name: _without_offsets(one) for name, one in value.items() if name != "trim_offsets"}
    return [_without_offsets(one) for one in value] if isinstance(value, list) else value


def _first_difference(one: Any, other: Any) -> str:
    """Return the first difference of two parts of tokenizers as text."""
    if isinstance(one, dict) and isinstance(other, dict):
        key = next(key for key in sorted({*one, *other}) if one.get(key) != other.get(key))
        return f"{key} is {one.get(key)!r} in the model's and {other.get(key)!r} in the teacher's"
    if isinstance(one, list) and isinstance(other, list):
        place = next((p for p, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
        mine, theirs = (value[place] if place < len(value) else None for value in (one, other))
        return f"entry {place} is {mine!r} in the model's and {theirs!r} in the teacher's"
    return f"{one!r} in the model's and {other!r} in the teacher's"


def block_names(model: nn.Module, whose: str = "model") -> list[str]:
    """Return the names of a model's blocks: the children of its longest `ModuleList` or `Sequential` that
    has parameters and is not inside another one.

    Raises:
        ConfigError: the model has no such list.
    """
    lists = {
        name: len(module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential) and any(True for _ in module.parameters())
    }
    outer = [name for name in lists if not any(other != name and name.startswith(f"{other}.") for other in lists)]
    if not outer:
        raise ConfigError(
            f"the {whose} {type(model).__name__} has no list of blocks; name pairs of modules in distillation.layers"
        )
    chosen = max(outer, key=lambda name: lists[name])
    return [f"{chosen}.{place}" if chosen else str(place) for place in range(lists[chosen])]


def _module_name(model: nn.Module, name: str, whose: str) -> str:
    if name.lstrip("-").isdigit():
        blocks = block_names(model, whose)
        if not -len(blocks) <= int(name) < len(blocks):
            raise ConfigError(
                f"distillation.layers has block {name} of the {whose}; write a number from {-len(blocks)} to "
                f"{len(blocks) - 1}"
            )
        return blocks[int(name)]
    try:
        model.get_submodule(name)
    except AttributeError as error:
        raise ConfigError(
            f"distillation.layers has {name!r}, which the {whose} lacks; write a name of its named_modules()"
        ) from error
    return name


def _record_hidden(name: str, seen: _Seen) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        found = output[0] if isinstance(output, tuple | list) else getattr(output, "last_hidden_state", output)
        if not isinstance(found, Tensor):
            raise ModelError(f"module {name!r} returns no hidden states but a {type(found).__name__}")
        seen.hidden[name] = found
        if not torch.is_grad_enabled():
            seen.ungraded.add(("hidden", name))

    return hook


def _record_attention(name: str, seen: _Seen) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        found = output[1] if isinstance(output, tuple | list) and len(output) > 1 else None
        if isinstance(found, Tensor) and found.dim() == 4 and name not in seen.attention:
            seen.attention[name] = found
            if not torch.is_grad_enabled():
                seen.ungraded.add(("attention", name))

    return hook


def _check_gradients(student: nn.Module, own: _Seen) -> None:
    """Check that compared tensors of trained modules pass gradients on.

    Raises:
        ModelError: a module ran without gradients, as inside of reentrant checkpointing, which repeats the module's
            forward later.
    """
    for term, name in sorted(own.ungraded):
        tensor = own.hidden[name] if term == "hidden" else own.attention[name]
        if not tensor.requires_grad and any(one.requires_grad for one in student.get_submodule(name).parameters()):
            raise ModelError(
                f"distillation.{term} compares tensors of {name!r}, which were computed without gradients, as in "
                "reentrant activation checkpointing; enable checkpointing with use_reentrant=False, or set "
                f"distillation.{term} to 0"
            )


def _is_block(pair: tuple[str, str], wanted: _Seen) -> bool:
    return pair[1] in wanted.attention  # embeddings and norms have no attention


def _attention_term(own: _Seen, wanted: _Seen, pair: tuple[str, str], counted: Tensor | None) -> Tensor:
    mine, other = own.attention.get(pair[0]), wanted.attention[pair[1]]
    if mine is None or mine.shape != other.shape:
        shape = "none" if mine is None else str(tuple(mine.shape))
        raise ModelError(
            f"attention maps of {pair[0]!r} are {shape}, those of the teacher's {pair[1]!r} {tuple(other.shape)}; both "
            'models need attn_implementation="eager" and as many heads, or distillation.attention 0'
        )
    return attention_divergence(mine, other, counted if counted is not None and counted.dim() == 2 else None)


def _is_in_stub(model: nn.Module, name: str) -> bool:
    """Return True if a module is on another stage of a pipeline."""
    module = model
    for part in name.split("."):
        module = module.get_submodule(part)
        if is_stub(module):
            return True
    return False


def _has_encoder_and_decoder(model: nn.Module) -> bool:
    """Return True if logits belong to the positions of a decoder, which reads other ids than the encoder before it."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def _arguments_of_teacher(student: nn.Module, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments without labels. If the model makes the ids of its decoder from labels, the teacher gets the
    same ids."""
    found = {name: value for name, value in kwargs.items() if name != "labels"}
    labels, make_ids = kwargs.get("labels"), getattr(student, "prepare_decoder_input_ids_from_labels", None)
    has_ids = any(found.get(name) is not None for name in ("decoder_input_ids", "decoder_inputs_embeds"))
    if make_ids is not None and _has_encoder_and_decoder(student) and isinstance(labels, Tensor) and not has_ids:
        found["decoder_input_ids"] = make_ids(labels)
    return found


def _has_token_labels(arguments: Mapping[str, Any]) -> bool:
    """Return True if a model has logits for each token: labels, if given, have the shape of the token ids."""
    labels, ids = arguments.get("labels"), arguments.get("input_ids")
    return not (isinstance(labels, Tensor) and isinstance(ids, Tensor)) or labels.shape == ids.shape


def _counted(student: nn.Module, has_tokens: bool, kwargs: Mapping[str, Any], tokens: str) -> Tensor | None:
    """Return a mask `[rows, length]` of the positions whose logits count; None: all."""
    decodes = _has_encoder_and_decoder(student)
    mask, labels = kwargs.get("decoder_attention_mask" if decodes else "attention_mask"), kwargs.get("labels")
    if not has_tokens:
        return None
    if tokens == "labelled":
        if labels is None:
            raise ModelError(
                'distillation.tokens is "labelled", but the batch has no labels; pass them, or write "all"'
            )
        if decodes:  # its labels are the next tokens already
            return torch.ne(labels, IGNORED_LABEL)
        nexts = labels.new_full(labels.shape, IGNORED_LABEL)
        nexts[:, :-1] = labels[:, 1:]
        return torch.ne(nexts, IGNORED_LABEL)
    return mask if isinstance(mask, Tensor) and mask.dim() == 2 else None


def _mask_of_decoder(kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return a mask `[rows, length]` of the decoder's positions without padding, for an encoder-decoder that
    classifies sequences; None: all. Its decoder reads the encoder's ids, moved by one position, unless it is given ids
    of its own."""
    mask = kwargs.get("decoder_attention_mask")
    if mask is None and not any(
        kwargs.get(name) is not None for name in ("decoder_input_ids", "decoder_inputs_embeds")
    ):
        encoder = kwargs.get("attention_mask")
        if isinstance(encoder, Tensor) and encoder.dim() == 2:
            mask = torch.ones_like(encoder)
            mask[:, 1:] = encoder[:, :-1]
    return mask if isinstance(mask, Tensor) and mask.dim() == 2 else None


def _positions(counted: Tensor | None, hidden: Tensor) -> Tensor | None:
    fits = counted is not None and hidden.dim() == 3 and counted.shape == hidden.shape[:2]
    return counted if fits else None


def _width(model: nn.Module) -> int | None:
    config = getattr(model, "config", None)
    width = getattr(getattr(config, "text_config", config), "hidden_size", None)
    return width if isinstance(width, int) else None


def _get(output: Any, name: str) -> Any:
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)


def _logits(output: Any, whose: str) -> Tensor:
    found = _get(output, "logits")
    if not isinstance(found, Tensor) and whose == "teacher" and isinstance(output, Tensor):
        return output
    if not isinstance(found, Tensor):
        raise ModelError(
            f"the {whose} returns a {type(output).__name__} without logits; return an object or a dict with logits and "
            "loss, as models of transformers do"
        )
    return found


def _with_loss(output: Any, loss: Tensor) -> Any:
    if isinstance(output, dict):  # includes outputs of transformers, whose attributes follow their keys
        output["loss"] = loss
    else:
        output.loss = loss
    return output


def _other_vocabulary(own: Any, other: Any) -> ConfigError:
    return ConfigError(
        f"the model has {own} tokens or classes and the teacher {other}; use a teacher with the same vocabulary and "
        "tokenizer"
    )
