"""Launcher of ranks. Reading order: config_arguments (arguments for training scripts); rank_placement, program,
launch_plan (what is started); exec_rank (start of one rank), rank_processes, rank_jobs (ranks of this machine);
exit_status, supervisor, rank_output, rendezvous_store, local_launch, start_ranks, elastic_restart (restart with fewer
ranks); hostfile, shell_quoting, exported_environment, agent_channel, node_agent, ssh_connection, remote_launch (other
machines); launcher_backends, external_rank, launcher_process (other launchers); launch_flags, plan_from_flags,
launch_command (command line), pdsh_agent, torch_agent."""
