"""Version of windlass's stand-in for `deepspeed`: the DeepSpeed version whose API it has, plus its own number."""

VERSION = "0.19.8+windlass.1"
