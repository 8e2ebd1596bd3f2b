"""Stand-in for DeepSpeed: with the folder `path` first on `sys.path`, `import deepspeed` imports windlass.

Start with:
- stand_in_entry, not_built: a table entry for one name; the error for names that windlass does not implement.
- tables, stand_in_names: maps from DeepSpeed's dotted names to windlass's; all maps combined.
- module_finder: import hook that creates `deepspeed.*` modules from the maps.
- stand_in_path, deepspeed: the folder for PYTHONPATH; a module that installs the stand-in when imported.

Every other module implements DeepSpeed names that have no counterpart in windlass itself. `python -m windlass.compat`
prints the folder for PYTHONPATH.

    $ export PYTHONPATH=$(python -m windlass.compat)
    $ python -c 'import deepspeed; print(deepspeed.__version__)'
"""
