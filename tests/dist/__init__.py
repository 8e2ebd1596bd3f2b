"""Laws that hold between ranks: every test here runs functions on a warm pool of gloo workers."""
