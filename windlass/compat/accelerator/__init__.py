"""The device by the names that scripts of DeepSpeed ask. Reading order: interface (what every device answers), host,
cuda, choose (which one this process has)."""
