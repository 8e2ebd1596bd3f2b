"""The benchmarks' own logic; never their figures."""
