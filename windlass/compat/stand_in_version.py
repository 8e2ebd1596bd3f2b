"""The version that the stand-in answers with: the DeepSpeed whose interface it has, and its own number."""

VERSION = "0.19.8+windlass.1"
