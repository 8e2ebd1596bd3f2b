"""Command line of windlass. Reading order: main (the commands), expected_errors (how errors are printed), env, run,
check, verify, generate, train."""
