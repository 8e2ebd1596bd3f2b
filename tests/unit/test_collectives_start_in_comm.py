"""Law: outside `windlass/comm` and `windlass/compat` no module calls a collective of torch.distributed, or of a process
group, itself."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

import windlass

PACKAGE = Path(windlass.__file__).parent
ALLOWED_FOLDERS = ("comm", "compat")
STEMS = ("all_gather", "all_reduce", "all_to_all", "broadcast", "gather", "isend", "irecv", "recv", "reduce", "scatter")
COMMUNICATING = {name for name in dir(dist) if name.startswith((*STEMS, "send")) and callable(getattr(dist, name))} | {
    "P2POp",
    "barrier",
    "batch_isend_irecv",
    "destroy_process_group",
    "init_process_group",
    "monitored_barrier",
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "split_group",
}


FUNCTIONAL = ("torch.distributed.nn", "torch.distributed.nn.functional", "torch.distributed._functional_collectives")
MODULES = {"torch.distributed", "torch.distributed.distributed_c10d", *FUNCTIONAL}
GROUP_METHODS = {
    name for name in dir(dist.ProcessGroup) if name.strip("_").startswith((*STEMS, "all", "send", "barrier"))
} | {"monitored_barrier"}
METHODS_OF_OTHERS = {"barrier", "broadcast", "gather", "recv", "reduce", "reduce_scatter", "scatter", "send"}
GROUPS = re.compile(r"(^|[._])(process_group|cpu_group|pg|WORLD)$")
"""Names of process groups, for methods that classes of windlass have too."""
HINT = re.compile("distributed|" + "|".join(sorted(GROUP_METHODS - METHODS_OF_OTHERS)) + "|process_group|cpu_group|pg")


def communicates(module: str, name: str) -> bool:
    return name in COMMUNICATING or (module in FUNCTIONAL and name.startswith((*STEMS, "permute_tensor")))


def raw_calls(source: str) -> Iterator[str]:
    """Yield the functions of torch.distributed in `source` that communicate or create groups, however imported, and
    the methods of process groups."""
    if not HINT.search(source):  # parsing takes long
        return
    tree = ast.parse(source)
    modules, names = {name: name for name in MODULES}, {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {a.asname: a.name for a in node.names if a.asname and a.name in MODULES}
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                path, here = f"{node.module}.{alias.name}", alias.asname or alias.name
                if path in MODULES:
                    modules[here] = path
                elif node.module in MODULES and communicates(node.module, alias.name):
                    names[here] = alias.name
    modules |= {
        f"{here}.{path.removeprefix(full + '.')}": path  # d.nn.functional after "import torch.distributed as d"
        for here, full in list(modules.items())
        for path in MODULES
        if path.startswith(full + ".")
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            if (
                communicates(modules.get(owner, ""), node.attr)
                if owner in modules
                else _is_group_method(owner, node.attr)
            ):
                yield node.attr
        elif isinstance(node, ast.Name) and node.id in names:
            yield names[node.id]
        elif (
            isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr" and ast.unparse(node.args[0]) in modules
        ):
            yield ast.unparse(node)


def _is_group_method(owner: str, name: str) -> bool:
    return name in GROUP_METHODS and (name not in METHODS_OF_OTHERS or bool(GROUPS.search(owner)))


def test_the_search_finds_each_kind_of_call() -> None:
    assert list(raw_calls("import torch.distributed as d\nd.all_reduce(x)\nd.get_rank()")) == ["all_reduce"]
    assert list(raw_calls("import torch\ntorch.distributed.barrier()")) == ["barrier"]
    assert list(raw_calls("from torch import distributed\ndistributed.new_group([0])")) == ["new_group"]
    assert list(raw_calls("from torch.distributed import broadcast as b\nb(x, 0)")) == ["broadcast"]
    assert list(raw_calls("import torch.distributed as dist\nstart(dist.isend, x)")) == ["isend"]
    functional = "torch.distributed.nn.functional"
    assert list(raw_calls(f"import {functional} as F\nF.all_reduce(x)")) == ["all_reduce"]
    assert list(raw_calls(f"import {functional}\n{functional}.broadcast(x)")) == ["broadcast"]
    assert list(raw_calls("from torch.distributed.nn import functional as F\nF.all_gather(x)")) == ["all_gather"]
    assert list(raw_calls("import torch.distributed as d\nd.nn.functional.gather(x)")) == ["gather"]
    assert list(raw_calls("from torch.distributed.nn import reduce_scatter\nreduce_scatter(x)")) == ["reduce_scatter"]
    source = "from torch.distributed import _functional_collectives as c\nc.all_gather_tensor(x)\nc.wait_tensor(x)"
    assert list(raw_calls(source)) == ["all_gather_tensor"]
    source = "from torch.distributed._functional_collectives import permute_tensor\npermute_tensor(x)"
    assert list(raw_calls(source)) == ["permute_tensor"]
    assert list(raw_calls("g.allreduce([x])\ng._allgather_base(x, y)")) == ["allreduce", "_allgather_base"]
    assert list(raw_calls("self.group.process_group.broadcast(x)\npg.barrier()")) == ["broadcast", "barrier"]
    assert len(list(raw_calls('import torch.distributed as d\ngetattr(d, "all_" + kind)(x)'))) == 1
    assert list(raw_calls("group.all_reduce(x)\nmesh.world.broadcast(x)\nall_reduce(x)")) == []
    assert {"all_gather_object", "broadcast_object_list", "gather_object", "send_object_list", "recv_object_list"} <= (
        COMMUNICATING
    )


def test_collectives_start_in_comm() -> None:
    results = {
        (file.relative_to(PACKAGE).as_posix(), name)
        for file in sorted(PACKAGE.rglob("*.py"))
        if file.relative_to(PACKAGE).parts[0] not in ALLOWED_FOLDERS
        for name in raw_calls(file.read_text(encoding="utf-8"))
    }
    outside = sorted(results)
    assert not outside, f"call the methods of comm/rank_group.RankGroup instead of torch.distributed: {outside}"
