"""Communication between ranks.

Start with: bootstrap, rank_group, transport, shm_transport, wire_transport, choose_transport. For the mesh: mesh_shape,
mesh_axis, mesh. For compressed messages: codec, compressed_collectives.
"""
