"""The stand-in for `deepspeed`: `import deepspeed` is windlass wherever this folder's `path` goes before the real one.

Reading order: entry (what the table says of a name), refusal (what a name that is not built does), tables (old dotted
name -> windlass), names (all tables as one), finder (modules made from it), place (the folder to put on PYTHONPATH),
deepspeed (import this first, and it happens). What names mean that windlass has under no name of its own: accelerator,
cores, builders, disk_handle, file_writers, optimizers, engine_axes, expert_groups, groups, places, experts, mixture,
sequence_groups, tensor_parallel, pipeline, messages, timers, ranges, leaves, whole_values,
on_device, repeating, moving, norms, parting, attribute_paths, tuning_arguments, script_arguments, config_words,
constants, standard, build_facts. `python -m windlass.compat` prints the folder.

    $ export PYTHONPATH=$(python -m windlass.compat)
    $ python -c 'import deepspeed; print(deepspeed.__version__)'
"""
