"""Launcher of ranks. Start with: rank_placement, program, launch_plan (hosts, ranks and program of a run); exec_rank,
rank_processes, rank_jobs (ranks of this machine); exit_status, supervisor, local_launch, start_ranks, elastic_restart
(restart with fewer ranks); hostfile, agent_channel, node_agent, ssh_connection, remote_launch (other machines);
launcher_backends, external_rank, launcher_process (other launchers); launch_flags, plan_from_flags, launch_command
(command line)."""
