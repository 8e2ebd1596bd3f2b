"""Saving in Hugging Face's format, from every stage of ZeRO."""

import os

import deepspeed
import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

WEIGHTS_NAME = "pytorch_model.bin"
CONFIG_NAME = "config.json"


def save_hf_format(model, tokenizer, output_dir, sub_folder=""):
    """Save weights, configuration and tokenizer. The weights are complete only at stages below 3."""
    model_to_save = model.module if hasattr(model, "module") else model
    output_dir = os.path.join(output_dir, sub_folder)
    os.makedirs(output_dir, exist_ok=True)
    save_dict = model_to_save.state_dict()
    for key in list(save_dict.keys()):
        if "lora" in key:
            del save_dict[key]
    torch.save(save_dict, os.path.join(output_dir, WEIGHTS_NAME))
    model_to_save.config.to_json_file(os.path.join(output_dir, CONFIG_NAME))
    tokenizer.save_pretrained(output_dir)


def _z3_params_to_fetch(param_list):
    return [p for p in param_list if hasattr(p, "ds_id") and p.ds_status == ZeroParamStatus.NOT_AVAILABLE]


def save_zero_three_model(model_ema, global_rank, save_dir, zero_stage=0):
    """Save at any stage: at stage 3 each parameter is gathered on all ranks in turn, and rank 0 copies it."""
    zero_stage_3 = zero_stage == 3
    os.makedirs(save_dir, exist_ok=True)
    output_model_file = os.path.join(save_dir, WEIGHTS_NAME)
    model_to_save = model_ema.module if hasattr(model_ema, "module") else model_ema
    if not zero_stage_3:
        if global_rank == 0:
            torch.save(model_to_save.state_dict(), output_model_file)
        return
    output_state_dict = {}
    for k, v in model_to_save.named_parameters():
        if hasattr(v, "ds_id"):
            with deepspeed.zero.GatheredParameters(_z3_params_to_fetch([v]), enabled=zero_stage_3):
                v_p = v.data.cpu().clone()
        else:
            v_p = v.cpu()
        if global_rank == 0 and "lora" not in k:
            output_state_dict[k] = v_p
    if global_rank == 0:
        torch.save(output_state_dict, output_model_file)
    del output_state_dict
