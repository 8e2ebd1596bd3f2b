"""Communication between ranks.

Reading order: slurm, rank_environment, socket_diagnosis, peer_owners, group_creation, bootstrap, rank_group,
traffic, ordered_sum, shared_memory, anonymous_pages, transport, gather_windows, shm_transport, wire_transport,
choose_transport. For the mesh: mesh_shape, point_to_point, mesh_axis, mesh.
"""
