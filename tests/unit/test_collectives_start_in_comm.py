"""Law: outside `windlass/comm` and `windlass/compat` no module calls a collective of torch.distributed itself."""

from __future__ import annotations

import ast
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


def raw_calls(source: str) -> Iterator[str]:
    """Yield the functions of torch.distributed in `source` that communicate or create groups, however imported."""
    if "distributed" not in source:  # parsing takes long
        return
    tree = ast.parse(source)
    modules, names = {"torch.distributed", "torch.distributed.distributed_c10d"}, {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {a.asname for a in node.names if a.asname and a.name in modules}
        elif isinstance(node, ast.ImportFrom) and node.module in modules | {"torch"}:
            for alias in node.names:
                if node.module == "torch" and alias.name == "distributed":
                    modules.add(alias.asname or alias.name)
                elif node.module != "torch":
                    names[alias.asname or alias.name] = alias.name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in COMMUNICATING and ast.unparse(node.value) in modules:
            yield node.attr
        elif isinstance(node, ast.Name) and names.get(node.id) in COMMUNICATING:
            yield names[node.id]


def test_the_search_finds_each_kind_of_call() -> None:
    assert list(raw_calls("import torch.distributed as d\nd.all_reduce(x)\nd.get_rank()")) == ["all_reduce"]
    assert list(raw_calls("import torch\ntorch.distributed.barrier()")) == ["barrier"]
    assert list(raw_calls("from torch import distributed\ndistributed.new_group([0])")) == ["new_group"]
    assert list(raw_calls("from torch.distributed import broadcast as b\nb(x, 0)")) == ["broadcast"]
    assert list(raw_calls("import torch.distributed as dist\nstart(dist.isend, x)")) == ["isend"]
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
