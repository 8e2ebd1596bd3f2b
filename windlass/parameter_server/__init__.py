"""Parameter server: servers own shards of parameters and optimizer states, workers pull and push.

Reading order: settings, parameter_partition, update_clock, snapshot, server_shard, messages, heartbeat, model_layout,
job_rendezvous, server, shard_replica, shard_process, worker, job.
"""

from __future__ import annotations

from windlass.parameter_server.job import start as start
from windlass.parameter_server.settings import ParameterServerSettings as ParameterServerSettings
from windlass.parameter_server.worker import ParameterServerWorker as ParameterServerWorker
from windlass.parameter_server.worker import ServerLostError as ServerLostError
from windlass.parameter_server.worker import StalePushError as StalePushError
