"""Access to full values and shards of single parameters."""
