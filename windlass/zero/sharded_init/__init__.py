"""Construction of models whose parameters are sharded as soon as they exist."""
