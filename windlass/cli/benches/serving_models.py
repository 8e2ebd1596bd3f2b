"""Models with random weights, for benchmarks of inference servers."""

from __future__ import annotations

from pathlib import Path

VOCABULARY = 8192


def make_random_llama(folder: Path, hidden: int, layers: int, *, longest: int = 16_384) -> Path:
    """Write a random float32 Llama with a vocabulary of 8,192 tokens, and a tokenizer for it. Return `folder`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=max(hidden // 64, 1),
        num_key_value_heads=max(hidden // 256, 1),
        vocab_size=VOCABULARY,
        max_position_embeddings=longest,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """Write a byte-level tokenizer without merges. Each token id beyond the bytes stands for a word."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    bytes_of_text = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<s>", "</s>", *bytes_of_text]
    words += [f"\u0120w{number}" for number in range(len(words), VOCABULARY)]  # U+0120 stands for a space
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
