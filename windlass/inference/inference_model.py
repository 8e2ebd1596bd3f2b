"""Model prepared for inference: sharded over ranks. An engine with continuous batching computes its `generate`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from windlass.base.compute_device import local_device
from windlass.base.errors import CommunicationError, ConfigError, ModelError, RequestError
from windlass.base.log import logger
from windlass.inference.engine_factory import make_engine, make_rank_engine
from windlass.inference.engine_options import EngineOptions
from windlass.inference.llm import LLM
from windlass.inference.model_forward import CausalForward, find_device
from windlass.inference.model_loading import load_model, parse_dtype
from windlass.inference.packed_modules import pack_layers
from windlass.inference.parallel_model import shard_for_inference
from windlass.inference.rank_channel import RankChannel, RankCommand, open_channel
from windlass.inference.runner_factory import pack_before_sharding
from windlass.inference.stage_link import StageLink, open_stage_link, split_for_inference
from windlass.inference.transformers_generate import generate_by_engine

_SAMPLES = 4  # elements of a parameter that are compared before each `generate`


def init_inference(
    model: nn.Module | str | Path,
    *,
    tp: int = 1,
    ep: int = 1,
    pp: int = 1,
    dtype: str | torch.dtype = "auto",
    trust_remote_code: bool = False,
    **options: Any,
) -> InferenceModel:
    """Prepare a model for inference, in place. Collective over the ranks of the model.

    Args:
        model: a module, or the directory of a causal language model of transformers. Its parameters are moved to this
            rank's device, converted to `dtype`, and sharded.
        tp: number of ranks along the tensor-parallel axis.
        ep: number of ranks along the expert axis.
        pp: number of ranks along the pipeline axis; each keeps some layers.
        dtype: dtype of the parameters; `auto`: as they are. On the CPU, `fp16` gives float32.
        trust_remote_code: run Python files from the directories of the model and of a draft model.
        options: see `EngineOptions`. `weights` packs the linear layers in place, also those of encoders and
            classifiers. With `weights_tier` `disk` or `host`, the weights of a directory stay in a file.

    Raises:
        ConfigError: an option is not known, is out of range, or contradicts another option; or the number of ranks is
            not a multiple of `tp * ep * pp`.
        ModelError: the model cannot be loaded or sharded.
    """
    chosen = EngineOptions.from_arguments(tp=tp, ep=ep, pp=pp, **options)
    return InferenceModel(model, chosen, dtype, trust_remote_code=trust_remote_code)


class InferenceModel(nn.Module):
    """Module with the forward of `module`, and with transformers' `generate` computed by an engine.

    All ranks of a model make the same calls. The engine is built at the first `generate` (for a language model with
    packed weights or weights in a file, at construction), so that models that generate no tokens (encoders,
    classifiers) can be sharded and called too. Other attributes are those of `module`.

    Attributes:
        module: the model, sharded in place.
    """

    module: nn.Module

    def __init__(
        self,
        model: nn.Module | str | Path,
        options: EngineOptions,
        dtype: str | torch.dtype,
        *,
        trust_remote_code: bool = False,
    ) -> None:
        super().__init__()
        wanted, device = parse_dtype(dtype), local_device()
        if wanted == torch.float16 and device.type == "cpu":
            wanted = torch.float32  # the CPU has no fast float16 arithmetic
        several = options.num_ranks > 1
        self._ranks = open_channel(tp=options.tp, ep=options.ep, pp=options.pp) if several else None
        self._trusts = trust_remote_code
        self._llm: LLM | None = None
        if isinstance(model, nn.Module):
            module = _move(model, device, wanted).eval()
        elif options.streams_weights:
            engine = make_engine(model, options, dtype=dtype, trust_remote_code=trust_remote_code, skip_tokenizer=True)
            self._llm, module = LLM.from_engine(engine), engine.runner.model
        else:
            with nullcontext() if self._ranks is None else self._ranks.guard():
                pipeline = None if self._ranks is None else self._ranks.pipeline
                module = load_model(
                    model, dtype=dtype, device=device, trust_remote_code=trust_remote_code, pipeline=pipeline
                )
        self._packs_all = options.weights is not None and isinstance(model, nn.Module) and not _makes_logits(module)
        self._options = options
        # id and version of each parameter, and bytes of some elements, at the last `generate`
        self._versions: tuple[list[tuple[int, int]], list[bytes]] = ([], [])
        self._tables: list[Any] = []  # description of the embeddings for which the engine was built
        self.module = module
        self._link: StageLink | None = None
        if self._ranks is not None:
            with self._ranks.guard():
                self._shard(module, self._ranks)
        elif self._packs_all:
            pack_layers(module, str(options.weights))
        if self._packs_all:
            self._options = options.replace(weights=None)
        elif options.weights is not None or options.streams_weights:
            self._find_llm()

    @property
    def llm(self) -> LLM:
        """The engine, with the interface of `windlass.LLM`."""
        return self._find_llm()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward without gradients. With `pp` no KV cache is used, and all ranks get the output."""
        with torch.inference_mode():
            if self._link is None or self._ranks is None:
                return self.module(*args, **kwargs)
            with self._ranks.guard():
                return self._ranks.share(self._run_stages(self._link, args, kwargs))

    def generate(
        self,
        input_ids: torch.Tensor | None = None,
        generation_config: Any = None,
        *,
        attention_mask: torch.Tensor | None = None,
        **settings: Any,
    ) -> Any:
        """Generate answers as transformers' `generate` does; see `generate_by_engine`.

        Calls with settings that the engine lacks, such as beams or a streamer, and all calls of encoder-decoders run
        the module's own `generate`.

        Raises:
            RequestError: a prompt is empty, or longer than the model's window with its answer; or there are no
                `input_ids`, and the module's own `generate` cannot run.
            ConfigError: the module generates no tokens, or pp splits it and the engine lacks a setting.
        """
        if input_ids is None and isinstance(settings.get("inputs"), torch.Tensor):
            input_ids = settings.pop("inputs")
        if generation_config is not None:
            settings["generation_config"] = generation_config
        own: Any = getattr(self.module, "generate", None)
        if own is None and not hasattr(self.module, "config"):
            raise ConfigError(
                f"{type(self.module).__name__} is not a language model of transformers; use .llm.generate"
            )
        if not getattr(getattr(self.module, "config", None), "is_encoder_decoder", False):
            found = generate_by_engine(self._find_current_llm, self.module, input_ids, attention_mask, **dict(settings))
            if found is not None:
                return found
        if self._link is not None or own is None:
            raise self._refusal(input_ids, settings)
        with torch.inference_mode():
            return own(input_ids, attention_mask=attention_mask, **settings)

    def _refusal(self, input_ids: torch.Tensor | None, settings: dict[str, Any]) -> ConfigError | RequestError:
        """Return the error for a call that neither the engine nor the module's own `generate` can serve."""
        kind = type(self.module).__name__
        if getattr(getattr(self.module, "config", None), "is_encoder_decoder", False):
            return ConfigError(
                f"{kind} is an encoder-decoder without a generate of its own, and the engine serves models that have "
                "only a decoder; call the model itself"
            )
        if input_ids is None or input_ids.dim() != 2 or len(input_ids) == 0:
            given = None if input_ids is None else f"of shape {tuple(input_ids.shape)}"
            return RequestError(
                f"input_ids is {given}; give token ids of shape [batch, tokens], with at least one row",
                parameter="input_ids",
            )
        needed = ", ".join(sorted(settings)) or "those of the model's generation_config"
        if self._link is not None:
            return ConfigError(
                f"settings of generate ({needed}) need the module's own loop and all layers on "
                "one rank, but pp splits the layers; leave these settings out, or use tp"
            )
        return ConfigError(
            f"the engine lacks these settings of generate ({needed}), and "
            f"{kind} has no generate of its own; leave them out, or use .llm.generate"
        )

    def _apply(self, fn: Callable[..., torch.Tensor], recurse: bool = True) -> InferenceModel:
        """Apply a function to the parameters, as `to`, `half` and `cuda` do. Do nothing if weights are packed or in a
        file and `fn` keeps their dtype and device.

        Raises:
            ConfigError: weights are packed or in a file, and `fn` would change their dtype or device.
        """
        options = self._options
        if options.weights is None and not options.streams_weights:
            super()._apply(fn, recurse)
            return self
        kept = next((one for one in self.module.parameters() if not one.is_meta), torch.empty(0))
        probe = torch.empty(0, dtype=kept.dtype, device=kept.device)
        found = fn(probe)
        if (found.dtype, found.device) != (probe.dtype, probe.device):
            raise ConfigError(
                f"weights are packed in {options.weights or options.weights_tier} for {probe.device}, and cannot "
                f"become {found.dtype} on {found.device}; move or convert the model before init_inference"
            )
        return self

    def close(self) -> None:
        """Free the KV cache. The module stays sharded. With streamed weights it cannot generate again."""
        if self._llm is not None:
            self._llm.close()
            self._llm = None

    def _shard(self, module: nn.Module, ranks: RankChannel) -> None:
        """Shard the module in place. A module that was loaded with pp already has only this rank's stage."""
        if open_stage_link(module, ranks.pipeline) is None:
            ranks.broadcast_model(module)
            if ranks.pipeline is not None:
                split_for_inference(module, ranks.pipeline)
        self._link = open_stage_link(module, ranks.pipeline)
        if self._packs_all:
            pack_layers(module, str(self._options.weights))
        elif self._options.weights is not None:
            pack_before_sharding(module, self._options.weights)
        shard_for_inference(module, ranks)

    def _run_stages(self, link: StageLink, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run this rank's stage; return the module's output on the last stage, None on others. Collective over the
        stages.
        """
        accepted = inspect.signature(self.module.forward).parameters
        arguments = {**dict(zip(accepted, args, strict=False)), **kwargs}
        for name, value in (("use_cache", False), ("output_router_logits", False)):
            if name in accepted:
                arguments[name] = value
        if not link.is_last:
            arguments.pop("labels", None)
        return link.run(self.module, arguments, None, torch.float32)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(super().__getattr__("module"), name)

    def _find_current_llm(self) -> LLM:
        """Return the engine; drop its cached keys and values if the weights have changed, e.g. by `load_state_dict`."""
        llm = self._find_llm()
        numbers = [(id(one), 0 if one.is_inference() else one._version) for one in self.module.parameters()]
        versions = numbers, _sample_weights(self.module)
        changed = versions != self._versions
        if self._ranks is not None:
            with self._ranks.guard():
                # A leader that closes the engine sends CLOSE, and does not take part in the reduction below.
                if self._ranks.is_leader:
                    self._ranks.send(RankCommand.RESULT, (None, None))
                elif self._ranks.receive()[0] is not RankCommand.RESULT:
                    raise CommunicationError("the first rank has closed the inference engine; load the model anew")
                # The reset is collective, and a write may change the samples of one rank alone.
                changed = not self._ranks.minimum(not changed)
        if changed:
            llm.reset_prefix_cache()
            self._versions = versions
        return llm

    def _find_llm(self) -> LLM:
        if self._llm is None and self._options.streams_weights:
            raise ConfigError(
                f"weights_tier is {self._options.weights_tier!r}, but the weight file is closed, or there is none "
                "because the model was a live module; call init_inference with the model's directory"
            )
        keeps_module = self._options.weights is None and not self._options.streams_weights and self._ranks is None
        tables = _describe_embeddings(self.module) if keeps_module else []
        if tables != self._tables:
            # the model was changed, e.g. by `double`: an engine has a fixed vocabulary, dtype and device
            self.close()
        if self._llm is None:
            self._tables = tables
            engine = make_rank_engine(
                self.module,
                self._options,
                trust_remote_code=self._trusts,
                skip_tokenizer=True,
                ranks=self._ranks,
                owned=self._options.weights is not None,
            )
            self._llm = LLM.from_engine(engine)
        return self._llm


def _sample_weights(module: nn.Module) -> list[bytes]:
    """Return the bytes of a few elements of each parameter. They show writes to `parameter.data`, such as
    `parameter.data.copy_(...)`, which change no version.
    """
    found: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    with torch.no_grad():
        for one in module.parameters():
            size = one.numel()
            if one.is_meta or type(one) is not nn.Parameter or one.layout is not torch.strided or not size:
                continue
            if not one.untyped_storage().nbytes():  # hooks of its module load it for each forward
                continue
            # elements from the first to the last one, in the order of the memory
            count = min(size, _SAMPLES) if one.is_contiguous() else 1
            elements = one.as_strided((count,), (max((size - 1) // max(count - 1, 1), 1),))
            if one.itemsize == 1:  # torch cannot join some types of one byte
                elements = elements.view(torch.uint8)
            found.setdefault((elements.device, elements.dtype), []).append(elements)
        return [torch.cat(parts).view(torch.uint8).cpu().numpy().tobytes() for parts in found.values()]


def _move(model: nn.Module, device: torch.device, dtype: torch.dtype | None) -> nn.Module:
    try:
        return model.to(device=device, dtype=dtype)
    except NotImplementedError as error:  # values of the meta device cannot be copied
        absent = [name for name, one in (*model.named_parameters(), *model.named_buffers()) if one.is_meta]
        if not absent:
            raise
        raise ModelError(
            f"{absent[0]} of {type(model).__name__} is on the meta device and has no values; load the values first, "
            "give the model's directory, or pass checkpoint to deepspeed.init_inference"
        ) from error


def _describe_embeddings(module: Any) -> list[Any]:
    """Return shape, dtype and device of the embeddings of a model of transformers; an empty list for other modules."""
    found = []
    for name in ("get_input_embeddings", "get_output_embeddings"):
        try:
            weight = getattr(module, name)().weight
        except (AttributeError, NotImplementedError):  # the module has no such table
            continue
        found.append((weight.shape, weight.dtype, weight.device))
    return found


def _makes_logits(model: nn.Module) -> bool:
    """Return True if a model computes logits for each token, as the engine needs them."""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return False
    ids = torch.zeros(2, dtype=torch.long, device=find_device(model))
    try:
        with torch.inference_mode():
            CausalForward(model)(ids, None, ids[:1])
    except Exception as error:  # the model's own code may raise anything
        logger.debug("%s generates no tokens, so only its forward is prepared: %s", type(model).__name__, error)
        return False
    return True
