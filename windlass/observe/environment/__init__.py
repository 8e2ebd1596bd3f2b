"""Facts about a machine: versions, hardware, network, settings. An error in finding one does not affect the others.

Reading order: try_fact, version_facts, hardware_facts, gpu_topology, network_facts, costly_settings, backend_support.
"""
