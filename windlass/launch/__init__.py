"""Starting ranks. Reading order: arguments (what scripts take), rank (how one begins), outcome (how they end), run,
elastic (with fewer)."""
