import re
from pathlib import Path
def sub(p,*prs):
    s=Path(p).read_text()
    for a,b in prs:
        if not re.search(a,s): print('!!',p,a)
        s=re.sub(a,b,s)
    Path(p).write_text(s)
sub('windlass/zero/sharded_init/initial_shard.py',(r'@cut\.setter','@shard.setter'),(r'def bring\(','def gather_parameter('))
sub('windlass/config/axis_sizes.py',(r'\(\{source\}\) the axes','({world_size_source}) the axes'),(r'\{axes\.readers\}','{axes.data_loading_size}'))
for p in ('windlass/comm/shm_transport.py','windlass/comm/wire_transport.py'):
    sub(p,(r'def gather\(self, buffer','def all_gather(self, buffer'),(r'def settle\(','def wait_until_read('),(r'def vacate\(','def free_memory('),(r'def occupy\(','def allocate_memory('))
sub('windlass/comm/shm_transport.py',(r'self\.settle\(','self.wait_until_read('))
sub('windlass/zero/core/unit.py',(r'def bring\(','def gather_parameter('))
sub('windlass/base/collective_activity.py',(r'\("around", "names", "operation"\)','("operation", "outer", "parameter_names")'))
sub('windlass/parallel/sequence/sequence_shard.py',(r'\("axis", "cut", "length", "seed", "sight", "whole"\)','("axis", "dropout_seed", "full_length", "gathers_outputs", "mask", "sharding")'))
sub('windlass/parallel/sequence/sequence_attention.py',(r'\("_tiles", "band", "share"\)','("_tiles", "mask_band", "shard")'),(r'share\.tokens','share.local_tokens'))
sub('windlass/checkpoint/pickle_stand_ins.py',(r'\("attributes", "given"\)','("arguments", "attributes")'),(r'\("saved",\)','("state",)'))
sub('windlass/zero/core/gradient_norm.py',(r'    vector = torch.cat\(\[total','    reduced = torch.cat([total'),(r'_reduce\(vector, 1','_reduce(reduced, 1'),(r'values = vector\.tolist','values = reduced.tolist'))
for p in ('windlass/zero/access/full_values.py','windlass/compat/tensor_fragment_api.py'):
    sub(p,(r'windlass\.zero\.core\.sharded_parameter import (full_values|shard_values)',r'windlass.zero.core.sharded_parameter import \1'))
sub('windlass/zero/access/full_values.py',(r'value\.global_shape','value.shape'))
sub('windlass/engine/sharded_init_partition.py',(r'full\.global_shape','full.shape'))
sub('windlass/verify/verification_session.py',(r'self\.job\.compared_steps','self.job.steps'))
sub('windlass/cli/training/train_loop.py',(r'self\.plan\.checkpoints\b','self.plan.checkpoint_folder'))
sub('windlass/checkpoint/checkpoint_index.py',(r'    plain_data: Any\n','    plain: Any\n'),(r'index\.reference','index.plain'))
sub('windlass/checkpoint/stored_checkpoint.py',(r'self\.index\.reference','self.index.plain'))
sub('windlass/checkpoint/checkpoint_listing.py',(r'index\.reference','index.plain'))
sub('windlass/parallel/experts/expert_routing.py',(r'\{self\.experts\}','{self.num_experts}'),(r'\{self\.score!r\}','{self.score_function!r}'))
sub('windlass/parallel/pipeline/forward_tracing.py',(r'(after|before|call)\.number\b',r'\1.index'))
sub('windlass/parallel/sequence/sequence_router_loss.py',(r'\{shard\.tokens\}','{shard.local_tokens}'))
sub('windlass/parallel/pipeline/staged_model.py',(r'\{self\.trace\.path\}','{self.trace.layers_path}'),(r'\{plan\.path\}','{plan.layers_path}'))
sub('windlass/compat/parameter_attributes.py',(r'place\.unit\.bring\(','place.unit.gather_parameter('))
sub('windlass/parallel/nvme_activation_store.py',(r'nbytes: int, what: str\) -> Any','nbytes: int, name: str) -> Any'),(r'def buffer\(self, nbytes','def allocate_buffer(self, nbytes'))
for p in ('windlass/compat/collectives/timed_calls.py','windlass/compat/nvtx_ranges.py','windlass/engine/pipeline_engine.py','windlass/initialize.py'):
    s=Path(p).read_text()
    s=re.sub(r'^(\w+) = (TypeVar|ParamSpec)\("\w+"',r'\1 = \2("\1"',s,flags=re.M); Path(p).write_text(s)
p='windlass/topology.py'; s=Path(p).read_text()
s=re.sub(r'\bGrid\b','MeshShape',s); s=s.replace('MeshShape as MeshShape as MeshShape','MeshShape as MeshShape'); Path(p).write_text(s)
