"""Starting ranks. In reading order: arguments (what scripts take), rank (what a rank is before it becomes the user's program), outcome (exit codes), run."""
