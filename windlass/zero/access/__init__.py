"""Access to a sharded model: full values, shards, averages, `.grad` and `.data`, generation, unfreezing."""
