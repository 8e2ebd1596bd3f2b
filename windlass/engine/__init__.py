"""Training engine: the object that `initialize` returns, and its saving, loading, reporting and pipeline parts."""
