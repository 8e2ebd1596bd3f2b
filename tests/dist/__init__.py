"""Tests of laws that hold between ranks. They run functions on a warm pool of gloo workers."""
