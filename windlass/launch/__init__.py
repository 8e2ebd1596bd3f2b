"""Starting ranks. Reading order: arguments (what scripts take); place, program, plan (what is asked); rank (how one
begins), ranks, jobs (those of this machine); outcome (how they end), conduct, console, store, local, run, elastic (with
fewer); hosts, quoting, exports, channel, node, ssh, fleet (other machines); back_ends, scheduled, starter (other
launchers); flags, request, command (the command line), deepspeed_command, node_command."""
