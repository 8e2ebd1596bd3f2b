"""Tests that a pipeline under the engine trains as one process: losses, norms and parameters, at every ZeRO stage."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.harness import RankError, run_ranks
from tests.dist.pipeline_engine_runs import (
    FAULTS,
    Came,
    Case,
    expected_of,
    from_a_loader,
    manners,
    own_optimizer,
    precise,
    read_apart,
    resume,
    save,
    survive,
    too_small,
    train,
    unfreeze,
    unfrozen_alone,
)
from tests.oracle import relative_error

BOUND = 1e-5
SEQUENCE_NORMS = (("parallel", {"pp": 2, "tp": 2, "tp_sequence_norms": True}),)


def _hold(case: Case, ranks: int) -> list[Came]:
    actual = run_ranks(train, ranks, case, timeout=120.0)
    readers = ranks // case.pp // 2 ** len([axis for axis in case.beside if axis != "ep"])
    expected = expected_of(case, readers)
    for outcome in actual:
        assert outcome.losses == pytest.approx(expected.losses, rel=BOUND), case
        assert outcome.norms == pytest.approx(expected.norms, rel=BOUND), case
        assert outcome.evaluated == pytest.approx(expected.evaluated, rel=BOUND), case
    error, where = relative_error(actual[0].params, expected.params)
    assert error <= BOUND, f"{case}: {where} off by {error:.2e}"
    return actual


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("pp", "ranks"), [(2, 2), (2, 4)])
def test_every_stage_of_zero(stage: int, pp: int, ranks: int) -> None:
    _hold(Case(pp=pp, stage=stage), ranks)


@pytest.mark.parametrize(
    "case",
    [
        Case(name="several", schedule="gpipe", stage=2),
        Case(name="tied", schedule="interleaved", chunks=2, stage=3, micros=3),
        # slow: test_pipeline covers these models; "row frozen" over pp=4 below covers their schedule, stage and pp
        pytest.param(Case(name="thrice", schedule="zero-bubble", stage=3, optimizer="SGD"), marks=pytest.mark.slow),
        pytest.param(Case(name="named", pp=4, stage=1, micros=2), marks=pytest.mark.slow),
        pytest.param(Case(name="row frozen", stage=2), marks=pytest.mark.slow),
        Case(name="row frozen", schedule="zero-bubble", stage=3, pp=4),
        Case(name="llama tied", stage=3, micros=3),
        Case(name="llama checkpointed", stage=3, gather="micro-batch"),
        pytest.param(Case(name="gpt2", schedule="zero-bubble", stage=2, optimizer="SGD"), marks=pytest.mark.slow),
        Case(name="gpt2", schedule="interleaved", chunks=2, stage=3),
        # slow: a test below trains mixtral over ep, and "llama checkpointed" above gathers per micro-batch
        pytest.param(Case(name="mixtral", stage=1, gather="micro-batch"), marks=pytest.mark.slow),
        Case(name="row ragged", stage=0, micros=2),
    ],
    ids=str,
)
def test_schedules_and_models(case: Case) -> None:
    _hold(case, 4)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Case(name="llama tied", stage=3), Case(name="llama tied", pp=4, stage=1, micros=8)),
        pytest.param(
            *(Case(name="llama tied", pp=4, stage=1, micros=8), Case(name="llama tied", pp=1, stage=3, micros=2)),
            marks=pytest.mark.slow,
        ),
        (Case(name="gpt2", pp=1, stage=2, micros=2), Case(name="gpt2", schedule="interleaved", chunks=2, stage=2)),
        pytest.param(Case(name="tied", pp=4, stage=0, micros=8), Case(name="tied", stage=3), marks=pytest.mark.slow),
        pytest.param(
            *(Case(name="tied", stage=2), Case(name="tied", schedule="interleaved", chunks=2, stage=2)),
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_run_resumes_in_another_layout(before: Case, after: Case, tmp_path: Path) -> None:
    """A checkpoint of one layout continues in another.

    The number of data-loading ranks times micro-batches is equal in both, so both read the same data, in another order.
    """
    run_ranks(save, 4, before, str(tmp_path), timeout=120.0)
    result = run_ranks(resume, 4, after, str(tmp_path), timeout=120.0)[0]
    same = run_ranks(resume, 4, before, str(tmp_path), timeout=120.0)[0]
    error, where = relative_error(result, same)
    assert error <= BOUND, f"{where} off by {error:.2e}"


@pytest.mark.parametrize(
    "case",
    [
        Case(name="llama", beside=("tp",), stage=3),
        Case(name="gpt2", beside=("tp",), stage=1, schedule="interleaved", chunks=2),
        pytest.param(
            Case(name="llama tied", beside=("tp",), stage=2, schedule="zero-bubble", optimizer="SGD"),
            marks=pytest.mark.slow,
        ),
        Case(name="llama", beside=("tp",), stage=1, config=SEQUENCE_NORMS),
        Case(name="llama", beside=("tp",), stage=1, schedule="interleaved", chunks=2, config=SEQUENCE_NORMS),
        Case(name="llama", beside=("sp",), stage=3, micros=3),
        pytest.param(
            Case(name="llama tied", beside=("sp",), stage=1, schedule="interleaved", chunks=2), marks=pytest.mark.slow
        ),
        pytest.param(Case(name="mixtral", beside=("ep",), stage=2), marks=pytest.mark.slow),
        Case(name="mixtral", beside=("ep",), stage=3, schedule="zero-bubble", optimizer="SGD"),
    ],
    ids=str,
)
def test_stages_combined_with_other_axes(case: Case) -> None:
    _hold(case, 4)


@pytest.mark.parametrize(
    ("case", "faulty", "ranks"),
    [
        (Case(name="row"), 0, 2),
        (Case(name="row", stage=2, schedule="zero-bubble"), 1, 2),
        (Case(name="row", stage=3, gather="micro-batch"), 2, 4),
        pytest.param(
            *(Case(name="row", stage=2, schedule="interleaved", chunks=2, gather="micro-batch"), 1, 4),
            marks=pytest.mark.slow,
        ),
        pytest.param(Case(name="row ragged", stage=1, schedule="gpipe"), 1, 4, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_error_of_one_stage_raises_on_all_and_the_next_batch_trains(case: Case, faulty: int, ranks: int) -> None:
    stage = faulty // (ranks // case.pp)
    faults = tuple(
        fault
        for fault in FAULTS
        if (fault != "loss" or stage == case.pp - 1) and (fault != "form" or (stage == 0 and case.name == "row"))
    )
    actual = run_ranks(survive, ranks, case, faults, faulty, timeout=240.0)
    expected = expected_of(case, ranks // case.pp)
    places = {"forward": f"the forward of micro-batch 1 in stage {stage} raised ValueError: no such label"}
    places |= {
        "evaluation": places["forward"],
        "first forward": f"the forward of micro-batch 0 in stage {stage} raised ValueError: no such label",
        "memory": f"the forward of micro-batch 0 in stage {stage} raised OutOfMemoryError: out of memory",
        "backward": f"in stage {stage} raised ValueError: no such gradient",
        "loss": f"in stage {stage} raised ModelError: the last stage returned a loss of shape",
        "loader": "reading micro-batches raised ModelError",
        "ended": "reading micro-batches raised StopIteration",
        "form": f"of micro-batch 0 in stage {stage} raised",
    }
    kinds = {"memory": "OutOfMemoryError", "loss": "ModelError", "loader": "ModelError", "ended": "PeerError"}
    for rank, (results, outcome) in enumerate(actual):
        for fault, kind, text in results:
            if rank == faulty:
                assert kind.split()[0] == kinds.get(fault, "ValueError") or fault == "form", (fault, kind, text)
            else:
                assert kind == f"PeerError{' out of memory' * (fault == 'memory')}", (rank, fault, kind, text)
            assert f"rank {faulty}: " in text and places[fault] in text, (rank, fault, text)
            assert "continue with the next batch" in text
        assert outcome.losses == pytest.approx(expected.losses, rel=BOUND)
        assert outcome.norms == pytest.approx(expected.norms, rel=BOUND)
        assert outcome.evaluated == pytest.approx(expected.evaluated, rel=BOUND)
    error, where = relative_error(actual[0][1].params, expected.params)
    assert error <= BOUND, f"{case}: {where} off by {error:.2e}"


@pytest.mark.parametrize("kind", ["windlass", "deepspeed"])
def test_queries_and_refusals_of_a_pipeline_engine(kind: str) -> None:
    first, last = run_ranks(manners, 2, kind)
    assert "PipelineEngine" in first["bases"] and ("DeepSpeedEngine" in first["bases"]) is (kind == "deepspeed")
    assert (first["first"], first["last"], last["first"], last["last"]) == (True, False, False, True)
    assert (first["stages"], last["stages"]) == ((0, 2, 2), (1, 2, 2))
    for result in (first, last):
        for name in ("forward", "backward", "step", "no_sync"):
            assert f"ModelError: engine.{name}() is not available for a pipeline" in result[name]
            assert "engine.train_batch(data_iter)" in result[name]
        assert "ModelError: a pipeline's engine does not compile its module" in result["compile"]
        assert "DataError: train_batch has nothing to read" in result["nothing"]
        assert "needs 2 micro-batches (gradient_accumulation_steps), and its iterator ended after 1" in result["few"]
        assert "is a pair (inputs, labels), not a Tensor" in result["no pair"]
        assert "reduce_output is 'sum'" in result["reduce"]
        assert result["ended"] and result["steps"] == 0 and result["unchanged"] and not result["boundary"]
    assert first["eval"][0] == last["eval"][0] and first["eval"][1] is None and last["eval"][1] == (4, 5, 8)
    assert first["own"] is None and float(last["own"]) == last["eval"][0]
    assert first["each"] is None and [float(loss) for loss in last["each"]] == [last["eval"][0]] * 3
    assert first["outputs"] is None and [tuple(out.shape) for out in last["outputs"]] == [(2, 5, 8), (2, 6, 8)]
    assert first["trained"] == last["trained"] == pytest.approx(last["eval"][0]) and first["again"] < first["trained"]


def test_stages_that_read_different_micro_batches_raise() -> None:
    with pytest.raises(RankError, match="ranks 0 and 1 are stages of one pipeline and got different"):
        run_ranks(read_apart, 2)


def test_training_data_is_repeated() -> None:
    first, last = run_ranks(from_a_loader, 2)
    assert first == last and len(first) == 5


def test_optimizer_of_the_full_model_steps_the_local_stage() -> None:
    by_groups, by_config = (run_ranks(own_optimizer, 2, groups)[0] for groups in (True, False))
    error, where = relative_error(by_groups, by_config)
    assert error <= BOUND, f"{where} off by {error:.2e}"


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_in_16_bits_losses_fall(precision: str) -> None:
    first, last = run_ranks(precise, 2, precision)
    assert first == last and first[-1] < 0.9 * first[0]


def _payload(case: Case, ranks: int = 4) -> list[Came]:
    """Train three steps. Return the trace of each rank, with the payload of the third step, as of every later one."""
    return run_ranks(train, ranks, case, 3, transport="gloo", timeout=120.0)


@pytest.mark.parametrize(
    "case",
    [
        Case(name="row", schedule="interleaved", chunks=2, stage=3),
        Case(name="row", schedule="zero-bubble", stage=2, optimizer="SGD"),
        Case(name="row frozen", schedule="interleaved", chunks=2, stage=2),
    ],
    ids=str,
)
def test_every_schedule_gathers_and_reduces_once(case: Case) -> None:
    for outcome in _payload(case):
        trained = [n for n in outcome.names if not (case.name.endswith("frozen") and n.split(".")[0] in "0123")]
        elements = {n: v.numel() for n, v in outcome.shapes.items()}
        assert outcome.payload["reduce"] == sum(elements[n] for n in trained)
        assert outcome.payload["gather"] == sum(elements[n] for n in (outcome.names if case.stage == 3 else trained))


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_parameters_are_gathered_and_gradients_reduced_once_a_step_or_once_a_micro_batch(stage: int) -> None:
    """A step of four micro-batches gathers and reduces each element once, or once per micro-batch, as configured."""
    once = _payload(Case(name="row", stage=stage))
    often = _payload(Case(name="row", stage=stage, gather="micro-batch"))
    for item, other in zip(once, often, strict=True):
        elements = sum(shape.numel() for shape in item.shapes.values())
        assert item.payload["reduce"] == elements and other.payload["reduce"] == 4 * elements
        assert item.payload["gather"] == elements
        if stage == 3:  # each micro-batch gathers in forward and backward, except units that stay unsharded in between
            assert 4 * elements <= other.payload["gather"] <= 8 * elements


def test_stage_that_does_not_fit_is_gathered_per_micro_batch() -> None:
    tight = run_ranks(too_small, 2, env={"WINDLASS_EMULATE_DEVICE": "64K"}, timeout=60.0)
    roomy = run_ranks(too_small, 2, env={"WINDLASS_EMULATE_DEVICE": "4M"}, timeout=60.0)
    assert [result["held"] for result in tight] == [0, 0] and all(result["held"] for result in roomy)
    assert all("zero-bubble" in result["refused"] for result in tight) and not any("refused" in f for f in roomy)
    assert [result["loss"] for result in tight] == pytest.approx([result["loss"] for result in roomy], rel=BOUND)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_unfrozen_stage_trains_after_all_ranks_refresh(stage: int) -> None:
    (first, state, text), (last, _, _) = run_ranks(unfreeze, 2, stage)
    losses, expected = unfrozen_alone()
    assert "call engine.refresh() on every rank of the pipeline first" in text
    assert first == last == pytest.approx(losses, rel=BOUND)
    error, where = relative_error(state, expected)
    assert error <= BOUND, f"{where} off by {error:.2e}"
