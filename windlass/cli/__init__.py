"""Command line of windlass: one module for each command. Start with: main (the table of commands), expected_errors (how
errors are printed), check, train."""
