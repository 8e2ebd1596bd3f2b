"""Tests that start programs: launchers, ranks that run scripts, and processes that end in various ways."""
