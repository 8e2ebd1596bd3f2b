"""Data: from text to resumable micro-batches.

In reading order: formats, corpus (documents); tokenizer, token_file, held_out, pack (tokens); permutation, sampler,
loader (the order in which ranks see them).
"""
