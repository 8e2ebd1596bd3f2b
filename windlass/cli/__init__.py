"""The command line. Reading order: main (the commands), failure (how errors end), env, run, check, verify, generate,
train."""
