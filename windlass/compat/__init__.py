"""The stand-in for `deepspeed`: `import deepspeed` is windlass wherever this folder's `path` goes before the real one.

Reading order: entry (what the table says of a name), refusal (what a name that is not built does), tables (old dotted
name -> windlass), names (all tables as one), finder (modules made from it), place (the folder to put on PYTHONPATH),
deepspeed (import this first, and it happens). `python -m windlass.compat` prints the folder.

    $ export PYTHONPATH=$(python -m windlass.compat)
    $ python -c 'import deepspeed; print(deepspeed.__version__)'
"""
