"""Tests of the benchmarks' logic, not of their figures."""
