"""Tests that start programs: launchers, ranks with scripts of their own, processes that end in every way."""
