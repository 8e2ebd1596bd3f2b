"""Optimizers by DeepSpeed's class names and arguments; the steps are torch's and windlass' own."""
