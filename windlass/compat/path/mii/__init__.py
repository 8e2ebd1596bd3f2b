"""Package `mii` of the stand-in: the functions of DeepSpeed-MII over windlass's inference engine."""

from windlass.compat.mii_deployment import MiiClient, client, serve
from windlass.compat.mii_pipeline import MiiPipeline, MiiResponse, pipeline

__all__ = ["MiiClient", "MiiPipeline", "MiiResponse", "client", "pipeline", "serve"]
