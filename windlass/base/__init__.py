"""The ground floor: errors, log, dtypes, pending, device, memory, tree."""
