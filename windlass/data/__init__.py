"""Data pipeline from text to resumable micro-batches.

Reading order: document_formats, corpus_sources (documents); tokenizer, token_file, held_out, pack_corpus (tokens);
resumable_samplers, resumable_loaders (order of samples on the ranks).
"""
