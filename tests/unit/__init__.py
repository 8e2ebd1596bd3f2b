"""Tests in one process, laid out as the package is; what has to start another with torch in it is in `process`."""
