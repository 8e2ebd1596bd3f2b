"""Tests in one process (or a few short ones), laid out as the package is."""
