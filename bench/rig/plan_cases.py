"""Configurations whose memory is predicted and measured. They differ in model family, stage, tiers, dtypes, sequence
length and parallel axes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

VOCABULARY, WIDTH, LAYERS, HEADS = 8192, 512, 4, 8


@dataclass(frozen=True)
class MemoryCase:
    """Configuration of one row.

    Attributes:
        family: llama, gpt2, opt, neox, mixtral, mamba (a loop over the tokens inside each layer) or t5.
        tier: Tier of optimizer states: device, cpu or nvme. On a CPU, `cpu` is the memory of the device.
        axis: Axis of `parallel` along which all ranks divide the model, its experts or its sequences; empty: data
            parallelism.
        reuse: Value of `stage3_max_reuse_distance`; None: the default, which keeps small models unsharded.
        device: cpu or cuda.
        sharded_init: Build the model under `zero.Init`.
        frozen: Only biases, norms and matrices of attention outputs are trained.
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

    @property
    def name(self) -> str:
        """Name of the row."""
        parts = [self.family, f"stage{self.stage}", self.dtype, f"{self.micro}x{self.length}", self.transport]
        parts += ["checkpointing"] if self.checkpointing else []
        parts += [self.tier] if self.tier != "device" else []
        parts += [f"reuse{self.reuse}"] if self.reuse is not None else []
        parts += [f"ranks{self.ranks}"] if self.ranks != 2 else []
        parts += [self.axis] if self.axis else []
        parts += [f"accumulate{self.accumulation}"] if self.accumulation > 1 else []
        parts += ["init"] if self.sharded_init else []
        parts += [self.optimizer] if self.optimizer != "AdamW" else []
        parts += ["frozen"] if self.frozen else []
        return "-".join(parts)

    def config(self, folder: str) -> dict[str, Any]:
        """Return the configuration of the engine. `folder` is for the NVMe tier."""
        zero: dict[str, Any] = {"stage": self.stage}
        if self.tier != "device":
            zero["offload_optimizer"] = {"device": self.tier} | ({"nvme_path": folder} if self.tier == "nvme" else {})
        if self.reuse is not None:
            zero["stage3_max_reuse_distance"] = self.reuse
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": self.micro,
            "gradient_accumulation_steps": self.accumulation,
            "zero_optimization": zero,
            "optimizer": {"type": self.optimizer, "params": {"lr": 1e-4}},
            "comm": {"transport": self.transport},
        }
        if self.axis:
            config["parallel"] = {self.axis: self.ranks}
        if self.dtype == "bf16":
            config["bf16"] = {"enabled": True}
        if self.dtype == "autocast":
            config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
        return config

    def build(self) -> Any:
        """Return the model."""
        import transformers

        kind = transformers.AutoModelForSeq2SeqLM if self.family == "t5" else transformers.AutoModelForCausalLM
        model = kind.from_config(self.model_config(), trust_remote_code=False)
        for name, parameter in model.named_parameters() if self.frozen else ():
            parameter.requires_grad_(parameter.dim() == 1 or any(part in name for part in ("o_proj", "out_proj")))
        return model

    def model_config(self) -> Any:
        """Return transformers' configuration of the model."""
        import transformers

        ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "use_cache": False, "vocab_size": VOCABULARY}
        sizes = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
        reach = {"max_position_embeddings": 2048}
        if self.family == "llama":
            return transformers.LlamaConfig(intermediate_size=1376, num_key_value_heads=4, **sizes, **reach, **ends)
        if self.family == "mixtral":
            experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 688}
            return transformers.MixtralConfig(
                num_key_value_heads=4, sliding_window=None, **experts, **sizes, **reach, **ends
            )
        if self.family == "mamba":
            return transformers.MambaConfig(hidden_size=256, num_hidden_layers=2, state_size=8, **ends)
        if self.family == "t5":
            own = {"d_model": WIDTH, "d_ff": 1376, "d_kv": WIDTH // HEADS, "num_layers": LAYERS, "num_heads": HEADS}
            return transformers.T5Config(decoder_start_token_id=0, **own, **ends)
        if self.family == "gpt2":
            own = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 2048}
            return transformers.GPT2Config(**own, **ends)
        if self.family == "opt":
            return transformers.OPTConfig(ffn_dim=2048, word_embed_proj_dim=WIDTH, **sizes, **reach, **ends)
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
)
"""44 rows; the models have 18 to 28 million parameters, so that buffers and activations are most of the memory."""

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
