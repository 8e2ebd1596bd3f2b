"""The ground floor: errors, log, dtypes, pending, device, tree."""
