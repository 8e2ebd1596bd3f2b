"""Fine-tuning of a small LLaMA on text, as in step 1 of DeepSpeed-Chat.

deepspeed main.py --zero_stage 3 --offload --dtype bf16 --gradient_checkpointing --output_dir output
"""

import argparse
import json
import math
import os

import deepspeed
import deepspeed.comm as dist
import torch
from deepspeed import get_accelerator
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from ds_configs import get_eval_ds_config, get_train_ds_config
from saving import save_hf_format, save_zero_three_model
from text import PromptDataset, StreamDataset, load_or_train_tokenizer, samples_of, sources
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    SchedulerType,
    default_data_collator,
    get_scheduler,
    set_seed,
)


def parse_args():
    parser = argparse.ArgumentParser(description="Fine-tune a LLaMA on a causal language modelling task")
    parser.add_argument("--model_name_or_path", type=str, default=None, help="a folder; by default a tiny one is made")
    parser.add_argument(
        "--output_dir", type=str, default="output", help="where the model, the tokenizer and checkpoints go"
    )
    parser.add_argument("--per_device_train_batch_size", type=int, default=4)
    parser.add_argument("--per_device_eval_batch_size", type=int, default=4)
    parser.add_argument("--max_seq_len", type=int, default=48)
    parser.add_argument("--train_samples", type=int, default=96)
    parser.add_argument("--eval_samples", type=int, default=16)
    parser.add_argument("--learning_rate", type=float, default=5e-3)
    parser.add_argument("--weight_decay", type=float, default=0.1)
    parser.add_argument("--num_train_epochs", type=int, default=2)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--lr_scheduler_type", type=SchedulerType, default="cosine")
    parser.add_argument("--num_warmup_steps", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--local_rank", type=int, default=-1, help="local rank passed from the launcher")
    parser.add_argument("--gradient_checkpointing", action="store_true")
    parser.add_argument("--stream", action="store_true", help="an iterable dataset instead of a DistributedSampler")
    parser.add_argument("--offload", action="store_true", help="offload optimizer states and parameters to host memory")
    parser.add_argument("--dtype", type=str, default="fp32", choices=["fp16", "bf16", "fp32"])
    parser.add_argument("--zero_stage", type=int, default=0)
    parser.add_argument("--enable_tensorboard", action="store_true")
    parser.add_argument("--tensorboard_path", type=str, default="tensorboard")
    parser.add_argument("--save_steps", type=int, default=0, help="updates between checkpoints; 0: none")
    parser.add_argument(
        "--max_train_steps", type=int, default=0, help="end after this number of updates, as a crash would"
    )
    parser.add_argument("--resume_from", type=str, default=None, help="a folder of checkpoints to resume from")
    parser.add_argument("--compare_saved", action="store_true", help="load what was saved, and evaluate that too")
    parser = deepspeed.add_config_arguments(parser)
    return parser.parse_args()


def get_optimizer_grouped_parameters(model, weight_decay, no_decay_name_list=("bias", "norm.weight")):
    """Return two parameter groups: biases and norms have no weight decay."""
    groups = [
        {
            "params": [
                p
                for n, p in model.named_parameters()
                if p.requires_grad and not any(nd in n.lower() for nd in no_decay_name_list)
            ],
            "weight_decay": weight_decay,
        },
        {
            "params": [
                p
                for n, p in model.named_parameters()
                if p.requires_grad and any(nd in n.lower() for nd in no_decay_name_list)
            ],
            "weight_decay": 0.0,
        },
    ]
    return [group for group in groups if group["params"]]


def create_hf_model(args, tokenizer, vocab_size):
    if args.model_name_or_path:
        model = AutoModelForCausalLM.from_pretrained(
            args.model_name_or_path, dtype=torch.float32, trust_remote_code=False
        )
    else:
        config = LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            tie_word_embeddings=False,
            use_cache=False,
        )
        model = LlamaForCausalLM(config)
    model.config.end_token_id = tokenizer.eos_token_id
    model.config.pad_token_id = tokenizer.pad_token_id
    model.resize_token_embeddings(int(8 * math.ceil(len(tokenizer) / 8.0)))  # multiples of 8 suit tensor cores
    return model


def to_device(batch, device):
    return {key: value.to(device) for key, value in batch.items()}


def evaluation(model, eval_dataloader, device):
    """Return perplexity and loss over all ranks."""
    model.eval()
    losses = 0
    for batch in eval_dataloader:
        with torch.no_grad():
            outputs = model(**to_device(batch, device))
        losses += outputs.loss.float()
    losses = losses / len(eval_dataloader)
    dist.all_reduce(losses, op=dist.ReduceOp.SUM)
    losses = losses / dist.get_world_size()
    model.train()
    try:
        perplexity = math.exp(losses.item())
    except OverflowError:
        perplexity = float("inf")
    return perplexity, losses.item()


def print_rank_0(message, rank):
    if rank <= 0:
        print(message, flush=True)


def main():
    args = parse_args()
    if args.local_rank == -1 and "LOCAL_RANK" not in os.environ:
        device = torch.device(get_accelerator().device_name())
    else:
        local_rank = int(os.environ["LOCAL_RANK"])
        get_accelerator().set_device(local_rank)
        device = torch.device(get_accelerator().device_name(), None if not torch.cuda.is_available() else local_rank)
    deepspeed.init_distributed()
    args.global_rank = torch.distributed.get_rank()
    world_size = torch.distributed.get_world_size()

    ds_config = get_train_ds_config(
        offload=args.offload,
        dtype=args.dtype,
        stage=args.zero_stage,
        enable_tensorboard=args.enable_tensorboard,
        tb_path=args.tensorboard_path,
        tb_name="sft",
    )
    ds_config["train_micro_batch_size_per_gpu"] = args.per_device_train_batch_size
    ds_config["train_batch_size"] = args.per_device_train_batch_size * world_size * args.gradient_accumulation_steps

    set_seed(args.seed)
    get_accelerator().manual_seed_all(args.seed)
    torch.distributed.barrier()

    texts = sources(24)
    tokenizer = load_or_train_tokenizer(os.path.join(args.output_dir, "tokenizer"), texts)
    vocab_size = len(tokenizer)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.padding_side = "right"
    model = create_hf_model(args, tokenizer, vocab_size)

    samples = samples_of(texts, tokenizer, args.max_seq_len, args.train_samples + args.eval_samples)
    train_samples, eval_samples = samples[: args.train_samples], samples[args.train_samples :]
    eval_dataset = PromptDataset(eval_samples)
    if args.stream:
        train_dataset = StreamDataset(train_samples, args.global_rank, world_size, args.seed)
        train_sampler = None
        batches = args.train_samples // world_size // args.per_device_train_batch_size
    else:
        train_dataset = PromptDataset(train_samples)
        if world_size == 1:
            generator = torch.Generator()
            train_sampler = RandomSampler(train_dataset, generator=generator)
        else:
            train_sampler = DistributedSampler(train_dataset, seed=args.seed)
        batches = math.ceil(math.ceil(args.train_samples / world_size) / args.per_device_train_batch_size)
    eval_sampler = (
        SequentialSampler(eval_dataset) if world_size == 1 else DistributedSampler(eval_dataset, shuffle=False)
    )
    train_dataloader = DataLoader(
        train_dataset,
        collate_fn=default_data_collator,
        sampler=train_sampler,
        batch_size=args.per_device_train_batch_size,
        drop_last=args.stream,
    )
    eval_dataloader = DataLoader(
        eval_dataset, collate_fn=default_data_collator, sampler=eval_sampler, batch_size=args.per_device_eval_batch_size
    )

    groups = get_optimizer_grouped_parameters(model, args.weight_decay)
    AdamOptimizer = DeepSpeedCPUAdam if args.offload else FusedAdam
    optimizer = AdamOptimizer(groups, lr=args.learning_rate, betas=(0.9, 0.95))
    num_update_steps_per_epoch = math.ceil(batches / args.gradient_accumulation_steps)
    lr_scheduler = get_scheduler(
        name=args.lr_scheduler_type,
        optimizer=optimizer,
        num_warmup_steps=args.num_warmup_steps,
        num_training_steps=args.num_train_epochs * num_update_steps_per_epoch,
    )
    model, optimizer, _, lr_scheduler = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        args=args,
        config=ds_config,
        lr_scheduler=lr_scheduler,
        dist_init_required=True,
    )
    if args.gradient_checkpointing:
        model.module.gradient_checkpointing_enable()

    begin_epoch, begin_step = 0, 0
    if args.resume_from:
        path, client_state = model.load_checkpoint(args.resume_from)
        assert path is not None, f"no checkpoint in {args.resume_from}"
        begin_epoch, begin_step = client_state["epoch"], client_state["step"]
        print_rank_0(f"resumed from {path} at epoch {begin_epoch}, step {begin_step}", args.global_rank)
    else:
        perplexity, eval_loss = evaluation(model, eval_dataloader, device)
        print_rank_0(f"ppl: {perplexity:.4f}, loss: {eval_loss:.6f}, before training", args.global_rank)

    updates = model.global_steps
    for epoch in range(begin_epoch, args.num_train_epochs):
        print_rank_0(f"Beginning of Epoch {epoch + 1}/{args.num_train_epochs}", args.global_rank)
        skip = begin_step if epoch == begin_epoch else 0
        if args.stream:
            train_dataset.set_epoch(epoch, skip * args.per_device_train_batch_size)
            numbered = enumerate(train_dataloader, start=skip)
        else:
            if world_size > 1:
                train_sampler.set_epoch(epoch)
            else:
                generator.manual_seed(args.seed + epoch)
            numbered = ((number, batch) for number, batch in enumerate(train_dataloader) if number >= skip)
        model.train()
        for step, batch in numbered:
            outputs = model(**to_device(batch, device), use_cache=False)
            loss = outputs.loss
            model.backward(loss)
            model.step()
            if model.global_steps == updates:
                continue
            updates = model.global_steps
            rate = lr_scheduler.get_last_lr()[0]
            print_rank_0(f"step {updates} loss {loss.item():.6f} lr {rate:.8f}", args.global_rank)
            if args.save_steps and updates % args.save_steps == 0:
                model.save_checkpoint(
                    os.path.join(args.output_dir, "checkpoints"), client_state={"epoch": epoch, "step": step + 1}
                )
            if updates == args.max_train_steps:
                return
        perplexity, eval_loss = evaluation(model, eval_dataloader, device)
        print_rank_0(f"ppl: {perplexity:.4f}, loss: {eval_loss:.6f}, after epoch {epoch + 1}", args.global_rank)
        model.tput_timer.update_epoch_count()

    if args.output_dir is not None:
        print_rank_0("saving the final model ...", args.global_rank)
        final = os.path.join(args.output_dir, "final")
        if args.global_rank == 0:
            save_hf_format(model, tokenizer, final)
        if args.zero_stage == 3:  # each rank has only a part of the model
            save_zero_three_model(model, args.global_rank, final, zero_stage=args.zero_stage)
        torch.distributed.barrier()

    if args.compare_saved:
        final = os.path.join(args.output_dir, "final")
        saved = AutoModelForCausalLM.from_pretrained(final, dtype=torch.float32, trust_remote_code=False)
        config = get_eval_ds_config(args.offload, args.dtype, args.zero_stage if args.zero_stage == 3 else 0)
        config["train_micro_batch_size_per_gpu"] = args.per_device_eval_batch_size
        config["train_batch_size"] = args.per_device_eval_batch_size * world_size
        saved, *_ = deepspeed.initialize(model=saved, config=config)
        perplexity, eval_loss = evaluation(saved, eval_dataloader, device)
        print_rank_0(f"ppl: {perplexity:.4f}, loss: {eval_loss:.6f}, as saved", args.global_rank)
        print_rank_0(json.dumps({"parameters": sum(p.numel() for p in saved.module.parameters())}), args.global_rank)


if __name__ == "__main__":
    main()
