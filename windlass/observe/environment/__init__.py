"""Facts of a machine, one at a time; each may fail alone.

Reading order: try_fact, version_facts, hardware_facts, gpu_topology, network_facts, costly_settings, backend_support.
"""
