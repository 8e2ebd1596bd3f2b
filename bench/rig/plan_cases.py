"""Configurations whose memory is predicted and measured. They differ in model family, stage, tiers, dtypes, sequence
length and parallel axes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from windlass.config.registered_optimizers import add_optimizer
from windlass.optim import CPUAdam

VOCABULARY, WIDTH, LAYERS, HEADS = 8192, 512, 4, 8


@dataclass(frozen=True)
class MemoryCase:
    """Configuration of one row.

    Attributes:
        family: llama, gpt2, opt, neox, mixtral, mamba (a loop over the tokens inside each layer) or t5.
        tier: Tier of optimizer states: device, cpu or nvme. On a CPU, `cpu` is the memory of the device.
        param_tier: Tier of parameters.
        axis: Axis of `parallel` along which ranks divide the model, its experts or its sequences; empty: data
            parallelism.
        along: Ranks along `axis`; 0: all of them.
        reuse: Value of `stage3_max_reuse_distance`; None: the default, which keeps small models unsharded.
        device: cpu or cuda.
        sharded_init: Build the model under `zero.Init`.
        optimizer: Type of the optimizer; `CPUAdam-8bit` has 8-bit states.
        frozen: Only biases, norms and matrices of attention outputs are trained.
        adapters: Only low-rank adapters (peft) of all linear layers in blocks are trained.
    """

    family: str
    stage: int
    dtype: str = "fp32"
    checkpointing: bool = False
    micro: int = 4
    length: int = 256
    transport: str = "shm"
    tier: str = "device"
    reuse: int | None = None
    ranks: int = 2
    accumulation: int = 1
    axis: str = ""
    device: str = "cpu"
    sharded_init: bool = False
    optimizer: str = "AdamW"
    frozen: bool = False
    param_tier: str = "device"
    along: int = 0
    adapters: bool = False

    @property
    def name(self) -> str:
        """Name of the row."""
        parts = [self.family, f"stage{self.stage}", self.dtype, f"{self.micro}x{self.length}", self.transport]
        parts += ["checkpointing"] if self.checkpointing else []
        parts += [self.tier] if self.tier != "device" else []
        parts += [f"parameters_{self.param_tier}"] if self.param_tier != "device" else []
        parts += [f"reuse{self.reuse}"] if self.reuse is not None else []
        parts += [f"ranks{self.ranks}"] if self.ranks != 2 else []
        parts += [self.axis + (str(self.along) if self.along else "")] if self.axis else []
        parts += [f"accumulate{self.accumulation}"] if self.accumulation > 1 else []
        parts += ["init"] if self.sharded_init else []
        parts += [self.optimizer] if self.optimizer != "AdamW" else []
        parts += ["frozen"] if self.frozen else []
        parts += ["adapters"] if self.adapters else []
        return "-".join(parts)

    def config(self, folder: str) -> dict[str, Any]:
        """Return the configuration of the engine. `folder` is for the NVMe tier."""
        zero: dict[str, Any] = {"stage": self.stage}
        for key, tier in (("offload_optimizer", self.tier), ("offload_param", self.param_tier)):
            if tier != "device":
                zero[key] = {"device": tier} | ({"nvme_path": folder} if tier == "nvme" else {})
        kind, _, states = self.optimizer.partition("-")
        if states:
            add_optimizer(kind, CPUAdam)  # a script passes an optimizer of this class itself
        if self.reuse is not None:
            zero["stage3_max_reuse_distance"] = self.reuse
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": self.micro,
            "gradient_accumulation_steps": self.accumulation,
            "zero_optimization": zero,
            "optimizer": {"type": kind, "params": {"lr": 1e-4, **({"state_dtype": states} if states else {})}},
            "comm": {"transport": self.transport},
        }
        if self.axis:
            config["parallel"] = {self.axis: self.along or self.ranks}
        if self.dtype == "bf16":
            config["bf16"] = {"enabled": True}
        if self.dtype == "autocast":
            config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
        return config

    def build(self, *, tiny: bool = False) -> Any:
        """Return the model, or a tiny one of its family."""
        import transformers

        kind = transformers.AutoModelForSeq2SeqLM if self.family == "t5" else transformers.AutoModelForCausalLM
        sizes = {"vocabulary": 64, "width": 64, "layers": 1} if tiny else {}
        model = kind.from_config(self.model_config(**sizes), trust_remote_code=False)
        for name, parameter in model.named_parameters() if self.frozen else ():
            parameter.requires_grad_(parameter.dim() == 1 or any(part in name for part in ("o_proj", "out_proj")))
        if self.adapters:
            import peft

            model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
        return model

    def model_config(self, vocabulary: int = VOCABULARY, width: int = WIDTH, layers: int = LAYERS) -> Any:
        """Return transformers' configuration of the model."""
        import transformers

        ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "use_cache": False, "vocab_size": vocabulary}
        sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": HEADS}
        reach = {"max_position_embeddings": 2048}
        if self.family == "llama":
            return transformers.LlamaConfig(intermediate_size=1376, num_key_value_heads=4, **sizes, **reach, **ends)
        if self.family == "mixtral":
            experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 688}
            return transformers.MixtralConfig(
                num_key_value_heads=4, sliding_window=None, **experts, **sizes, **reach, **ends
            )
        if self.family == "mamba":
            return transformers.MambaConfig(
                hidden_size=width // 2, num_hidden_layers=max(1, layers // 2), state_size=8, **ends
            )
        if self.family == "t5":
            own = {"d_model": width, "d_ff": 1376, "d_kv": width // HEADS, "num_layers": layers, "num_heads": HEADS}
            return transformers.T5Config(decoder_start_token_id=0, **own, **ends)
        if self.family == "gpt2":
            own = {"n_embd": width, "n_layer": layers, "n_head": HEADS, "n_positions": 2048}
            return transformers.GPT2Config(**own, **ends)
        if self.family == "opt":
            return transformers.OPTConfig(ffn_dim=2048, word_embed_proj_dim=width, **sizes, **reach, **ends)
        return transformers.GPTNeoXConfig(intermediate_size=2048, **sizes, **reach, **ends)


CASES = (
    MemoryCase("llama", 2),
    MemoryCase("gpt2", 3, "bf16"),
    MemoryCase("opt", 1, "bf16", checkpointing=True),
    MemoryCase("neox", 3, checkpointing=True, micro=2, length=512, transport="gloo"),
    MemoryCase("llama", 0, checkpointing=True),
    MemoryCase("llama", 3, transport="gloo", reuse=0),
    MemoryCase("gpt2", 1, transport="gloo"),
    MemoryCase("neox", 2, "autocast"),
    MemoryCase("opt", 2, tier="nvme"),
    MemoryCase("llama", 3, "bf16", tier="nvme", micro=2),
    MemoryCase("gpt2", 0, micro=8, length=128),
    MemoryCase("opt", 3, micro=1, length=1024),
    MemoryCase("neox", 1, micro=2, length=512),
    MemoryCase("llama", 1, "bf16", micro=8, length=128),
    MemoryCase("llama", 2, "bf16", accumulation=2, micro=2),
    MemoryCase("gpt2", 2, checkpointing=True, micro=2, length=1024),
    MemoryCase("opt", 0, "autocast", checkpointing=True),
    MemoryCase("neox", 0, "bf16"),
    MemoryCase("opt", 3, "bf16", transport="gloo", checkpointing=True, reuse=0),
    MemoryCase("neox", 3, "autocast", micro=2),
    MemoryCase("gpt2", 3, checkpointing=True, micro=16, length=128),
    MemoryCase("llama", 2, ranks=4, micro=2),
    MemoryCase("gpt2", 3, ranks=4, micro=2, transport="gloo"),
    MemoryCase("opt", 1, ranks=4, micro=2, length=128),
    MemoryCase("llama", 3, micro=1, length=2048),
    MemoryCase("neox", 2, "bf16", tier="nvme", checkpointing=True),
    MemoryCase("llama", 0, axis="tp"),
    MemoryCase("neox", 1, "bf16", axis="tp", checkpointing=True),
    MemoryCase("llama", 2, micro=2, length=1024, axis="sp"),
    MemoryCase("llama", 3, "bf16", micro=1, length=2048, axis="sp"),
    MemoryCase("mixtral", 2),
    MemoryCase("mixtral", 1, axis="ep"),
    MemoryCase("mixtral", 3, "bf16", axis="ep", micro=2),
    MemoryCase("llama", 0, axis="pp", accumulation=4),
    MemoryCase("gpt2", 1, "bf16", axis="pp", accumulation=4, micro=2, length=512),
    MemoryCase("opt", 3, micro=2, sharded_init=True),
    MemoryCase("neox", 1, axis="tp", sharded_init=True),
    MemoryCase("llama", 0, axis="pp", accumulation=4, sharded_init=True),
    MemoryCase("mixtral", 2, axis="ep", sharded_init=True),
    MemoryCase("mamba", 1, length=128),
    MemoryCase("t5", 2),
    MemoryCase("llama", 1, frozen=True),
    MemoryCase("llama", 2, optimizer="Muon"),
    MemoryCase("opt", 1, optimizer="Lamb"),
    MemoryCase("mamba", 1, checkpointing=True, length=128),
    MemoryCase("mamba", 2, "bf16", checkpointing=True, micro=2, length=256),
    MemoryCase("llama", 1, optimizer="CPUAdam-8bit"),
    MemoryCase("gpt2", 2, "bf16", optimizer="CPUAdam-8bit", checkpointing=True),
    MemoryCase("llama", 2, "bf16", adapters=True),
    MemoryCase("llama", 3, adapters=True, checkpointing=True),
    MemoryCase("llama", 3, tier="cpu", param_tier="cpu"),
    MemoryCase("gpt2", 3, "bf16", tier="nvme", param_tier="nvme", checkpointing=True),
    MemoryCase("llama", 3, tier="cpu", param_tier="nvme", transport="gloo"),
    MemoryCase("llama", 2, axis="tp", ranks=4, along=2, micro=2),
    MemoryCase("opt", 3, "bf16", axis="tp", ranks=4, along=2, micro=2),
    MemoryCase("llama", 1, axis="pp", accumulation=4, checkpointing=True),
    MemoryCase("neox", 0, "bf16", axis="pp", accumulation=4, checkpointing=True),
    MemoryCase("llama", 1, "bf16", axis="sp", ranks=4, along=2, micro=2, length=512, checkpointing=True),
)
"""58 rows; the models have 18 to 28 million parameters, so that buffers and activations are most of the memory."""

_ON_GPU: dict[str, Any] = {"device": "cuda", "transport": "auto", "ranks": 1, "micro": 8, "length": 512}
GPU_CASES = (
    MemoryCase("llama", 0, **_ON_GPU),
    MemoryCase("llama", 2, "bf16", **_ON_GPU),
    MemoryCase("gpt2", 1, **_ON_GPU),
    MemoryCase("gpt2", 3, "bf16", checkpointing=True, **_ON_GPU),
    MemoryCase("opt", 2, "autocast", **_ON_GPU),
    MemoryCase("opt", 2, "bf16", tier="cpu", **_ON_GPU),
    MemoryCase("neox", 3, tier="cpu", **_ON_GPU),
    MemoryCase("neox", 1, "bf16", checkpointing=True, **_ON_GPU),
)
"""Rows of one rank on a GPU, which has memory of its own."""
