"""A tokenizer and a text to fine-tune on, both from the sources of Python's standard library: nothing is downloaded."""

import os
import sysconfig
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.data import Dataset, IterableDataset
from transformers import PreTrainedTokenizerFast


def sources(count):
    """Return the texts of `count` modules of the standard library, by name, without the first (`__future__`)."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return [path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py"))[1 : count + 1]]


def load_or_train_tokenizer(folder, texts, vocab_size=500):
    """Return a byte-pair tokenizer without a pad token, as LLaMA's is. Rank 0 trains it once."""
    if not os.path.exists(os.path.join(folder, "tokenizer.json")) and torch.distributed.get_rank() == 0:
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.train_from_iterator(
            texts,
            trainers.BpeTrainer(
                vocab_size=vocab_size,
                special_tokens=["<unk>", "<s>", "</s>"],
                initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                show_progress=False,
            ),
        )
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
        ).save_pretrained(folder)
    torch.distributed.barrier()
    return PreTrainedTokenizerFast.from_pretrained(folder, trust_remote_code=False)


def samples_of(texts, tokenizer, max_seq_len, count):
    """Return `count` pieces of text, each padded to `max_seq_len`; padding does not count in the loss."""
    samples = []
    for text in texts:
        for start in range(0, len(text), 3 * max_seq_len):
            encoded = tokenizer(
                text[start : start + 3 * max_seq_len],
                max_length=max_seq_len,
                padding="max_length",
                truncation=True,
                return_tensors="pt",
            )
            ids, mask = encoded["input_ids"][0], encoded["attention_mask"][0]
            samples.append({"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)})
            if len(samples) == count:
                return samples
    raise ValueError(f"the text has only {len(samples)} pieces, {count} are asked for")


class PromptDataset(Dataset):
    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]


class StreamDataset(IterableDataset):
    """Stream of samples, in another order in each epoch. A rank takes every `world_size`-th sample."""

    def __init__(self, samples, rank, world_size, seed):
        self.samples, self.rank, self.world_size, self.seed = samples, rank, world_size, seed
        self.epoch, self.skip = 0, 0

    def set_epoch(self, epoch, skip=0):
        """Let the next iteration yield the samples of `epoch`, without the first `skip` of this rank."""
        self.epoch, self.skip = epoch, skip

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(len(self.samples), generator=generator).tolist()
        full = len(order) // self.world_size * self.world_size
        for index in order[self.rank : full : self.world_size][self.skip :]:
            yield self.samples[index]
