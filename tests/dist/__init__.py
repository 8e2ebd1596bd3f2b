"""Laws that hold between ranks. Every test runs functions on a warm pool of gloo workers."""
