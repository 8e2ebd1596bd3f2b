"""Runs of two ranks in which one rank has a fault, such as an exception, a kill or a skipped call; see `test_hangs`.

`python -m tests.process.hanging_runs FOLDER FAULT:TRANSPORT:RANK...` starts all runs at once. FOLDER has one folder
FAULT:TRANSPORT:RANK per run: rankN.out has the output of rank N, and rankN.status its exit code and run time (s).
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import windlass
from tests.dist import parallel_runs
from tests.ports import free_port
from windlass import watchdog
from windlass.base import log

RANKS = 2
REPORT_AFTER_S = 3.0
TIMEOUT_S = {"stop": 5.0, "pause": 5.0}
SLOW_S = 5.0
LEFT_S = 10.0  # seconds that a rank may outlive the others


def train(engine: Any) -> None:
    """Train two steps."""
    if hasattr(engine.module, "lm_head"):
        ids = torch.randint(0, 30, (2, 6), generator=torch.Generator().manual_seed(0))
        for _ in range(2):
            try:
                loss = engine(input_ids=ids, labels=ids).loss
                if engine.module.__dict__.pop("leaves_out", False):
                    raise ValueError("no such label")
                engine.backward(loss)
                engine.step()
            except ValueError as error:
                print(f"caught {error}")
        return
    for _ in range(2):
        engine.backward(engine(torch.randn(2, 8)).square().mean())
        engine.step()


def main(fault: str, faulty: int) -> None:
    """Run one rank."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "watchdog": {"report_after_s": REPORT_AFTER_S, "timeout_s": TIMEOUT_S.get(fault, 300.0)},
    }
    if fault in ("caught", "alike"):
        model, config["parallel"] = _llama(), {"tp": RANKS}
    if fault == "left out":
        model, config["parallel"] = parallel_runs.MODELS["mixtral"](tied=False), {"ep": RANKS}
    engine, *_ = windlass.initialize(model=model, config=config)
    if fault == "early" and dist.get_rank() == faulty:
        os.kill(os.getpid(), signal.SIGKILL)
    train(engine)
    pids = [0] * RANKS
    dist.all_gather_object(pids, os.getpid())
    rank = dist.get_rank()
    time.sleep(2 * REPORT_AFTER_S / 10)  # one heartbeat, so that the others have this rank's position
    if rank == faulty or fault == "alike":
        go_wrong(fault, engine, pids)
    elif fault in ("eval", "gather"):
        dist.barrier()
    train(engine)
    print("finished")


def _llama() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes))


def _once(module: torch.nn.Module, given: Any) -> None:
    if not getattr(module, "raised", False):
        module.raised = True
        raise ValueError("no such token")


def go_wrong(fault: str, engine: Any, pids: list[int]) -> None:
    """Cause the fault on this rank."""
    if fault == "save":
        engine.save_checkpoint(tempfile.gettempdir() + "/never")
    elif fault == "eval":
        engine.eval_batch(torch.randn(2, 8))
    elif fault == "gather":
        with windlass.zero.GatheredParameters(engine.module[0].weight):
            pass
    elif fault in ("caught", "alike"):  # in a layer between two collectives along tp
        engine.module.model.layers[1].register_forward_pre_hook(_once)
    elif fault == "left out":  # an error of the script between a forward and its backward
        engine.module.leaves_out = True
    elif fault == "return":
        sys.exit(0)
    elif fault in ("raise", "hook"):
        if fault == "hook":  # as a library that prints coloured tracebacks does
            sys.excepthook = traceback.print_exception
        raise ValueError("one rank is unwell")
    elif fault == "told":  # as a program that catches everything and ends at once
        try:
            raise ValueError("one rank is unwell")
        except ValueError as error:
            watchdog.report_failure(error)
            os._exit(1)
    elif fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "slow":
        time.sleep(SLOW_S)
    elif fault == "pause":  # suspends the whole run for longer than a wait may take
        ranks = " ".join(map(str, pids))
        subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -STOP {ranks}; sleep 6; kill -CONT {ranks}"])
        time.sleep(1.5)


def _fork(folder: Path, run: str, rank: int, port: int) -> int:
    fault, transport, faulty = run.split(":")
    child = os.fork()
    if child:
        return child
    out = os.open(folder / f"rank{rank}.out", os.O_WRONLY | os.O_CREAT)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "MASTER_PORT": str(port),
        "WINDLASS_TRANSPORT": transport,
    }
    log.set_log_level("WARNING", "the test")
    # end as a script does: through the exception hook and the exit handlers
    code = 0
    try:
        main(fault, int(faulty))
    except SystemExit as ended:
        code = ended.code
    except BaseException as error:
        code, sys.last_value = 1, error  # as Python itself does
        try:
            sys.excepthook(type(error), error, error.__traceback__)
        except SystemExit as ended:
            code = ended.code
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run_all(base: Path, runs: list[str]) -> None:
    """Start all runs at once. A stopped rank that outlives the others is killed."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    torch.set_num_threads(1)
    windlass.initialize  # noqa: B018  (imported here, once, not in every rank)
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]).step()  # load modules that torch imports late
    begin, children = time.monotonic(), {}
    for run in runs:
        (base / run).mkdir()
        port = free_port()
        for rank in range(RANKS):
            children[_fork(base / run, run, rank, port)] = (run, rank)
    while children:
        child, status = os.wait()
        run, rank = children.pop(child)
        text = f"{os.waitstatus_to_exitcode(status)} {time.monotonic() - begin:.1f}"
        (base / run / f"rank{rank}.status").write_text(text)
        for other, (same, _) in children.items():
            if same == run and run.startswith("stop"):
                late = threading.Timer(LEFT_S, lambda pid=other: pid in children and os.kill(pid, signal.SIGKILL))
                late.daemon = True
                late.start()


if __name__ == "__main__":
    run_all(Path(sys.argv[1]), sys.argv[2:])
