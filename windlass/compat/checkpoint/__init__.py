"""DeepSpeed's checkpoint files: reading, export and tools.

Reading order:
- deepspeed_format: the format that `windlass.checkpoint.foreign_formats` registers.
- safe_unpickler, pickle_stand_ins, zip_records, torch_file: files of `torch.save`, read without running code from them.
- deepspeed_index, deepspeed_shards, deepspeed_metadata_reader: an index of DeepSpeed's files.
- deepspeed_target, deepspeed_export, deepspeed_flat_layout, deepspeed_metadata_writer: DeepSpeed's files, written
  next to windlass's.
- consolidated, consolidated_files, recovery_scripts, to_windlass: full weights and conversions, like DeepSpeed's tools.
"""
