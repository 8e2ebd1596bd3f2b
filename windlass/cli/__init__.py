"""The command line. In reading order: main (which commands there are, how errors end), env, run, check, train, generate."""
