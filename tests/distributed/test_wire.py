"""Plans survive the wire, are small, and what is no plan is refused."""

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arbi_core.distributed.wire import decode_plan, encode_plan
from arbi_core.sampler.params import SamplingParams
from arbi_core.scheduler.plan import AdmitRow, Chunk, StepPlan, Transfer, TransferOp

INT32 = st.integers(0, 2**31 - 1)
SLOT = st.integers(0, 65535)
TRANSFERS = st.lists(
    st.builds(Transfer, st.sampled_from(TransferOp), st.integers(0, 2**63 - 1), INT32), max_size=4
).map(tuple)
SAMPLING = st.builds(
    SamplingParams,
    max_tokens=st.none() | st.integers(1, 10**9),
    temperature=st.floats(0, 100) | st.integers(0, 100),
    top_k=st.integers(-1, 10**6),
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1),
    presence_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.01, 100),
    logit_bias=st.none() | st.dictionaries(st.integers(0, 200_000), st.floats(-100, 100), max_size=4),
    seed=st.none() | st.integers(-(2**63), 2**64 - 1),
    stop=st.lists(st.text(min_size=1), max_size=3),
    stop_token_ids=st.lists(INT32, max_size=3),
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 128),
    logits_processors=st.lists(st.text(min_size=1), max_size=2),
)
ROWS = st.builds(
    AdmitRow,
    slot=SLOT,
    request_id=st.text(),
    token_ids=st.lists(INT32, min_size=1, max_size=50).map(tuple),
    num_prompt=INT32,
    computed=INT32,
    pages=st.lists(INT32, max_size=8).map(tuple),
    sampling=SAMPLING,
    base_seed=st.integers(-(2**63), 2**64 - 1),
    stop_token_ids=st.frozensets(INT32, max_size=4),
    state_row=INT32,
)
PLANS = st.builds(
    StepPlan,
    index=st.integers(0, 2**62),
    dropped=st.lists(SLOT, max_size=5).map(tuple),
    transfers=TRANSFERS,
    admitted=st.lists(ROWS, max_size=3).map(tuple),
    new_pages=st.lists(st.tuples(SLOT, INT32), max_size=5).map(tuple),
    decode=st.lists(SLOT, max_size=20),
    chunks=st.lists(st.builds(Chunk, SLOT, INT32, st.booleans()), max_size=4).map(tuple),
    snapshots=TRANSFERS,
    polls=st.booleans(),
)


def values(plan):
    return [
        value.tolist() if isinstance(value := getattr(plan, a.name), np.ndarray) else value
        for a in attrs.fields(StepPlan)
    ]


@settings(max_examples=150, deadline=None)
@given(plan=PLANS, collected=st.integers(-1, 2**62))
def test_every_plan_comes_out_as_it_went_in(plan, collected):
    frame = decode_plan(encode_plan(plan, collected))
    assert frame.collected == collected
    assert values(frame.plan) == values(plan)
    assert frame.plan.decode.dtype == np.int64


def test_every_field_of_a_plan_is_sent():
    """A new field of `StepPlan` must find its place in the wire format, and here."""
    known = {"index", "dropped", "transfers", "admitted", "new_pages", "decode", "chunks", "snapshots", "polls"}
    assert {a.name for a in attrs.fields(StepPlan)} == known


def test_a_step_of_256_decoding_rows_takes_little_more_than_a_kilobyte():
    plan = StepPlan(
        index=7, decode=np.arange(256), new_pages=tuple((16 * i, 1000 + i) for i in range(16)), dropped=(3,)
    )
    assert len(encode_plan(plan, 6)) < 1300


@given(cut=st.integers(0, 10**6))
def test_a_truncated_plan_is_refused(cut):
    row = AdmitRow(
        slot=1, request_id="r", token_ids=(1, 2), num_prompt=2, computed=0, pages=(3,), sampling=SamplingParams(),
        base_seed=0,
    )  # fmt: skip
    data = encode_plan(StepPlan(index=1, decode=[1, 2], admitted=(row,)), 0)
    with pytest.raises(ValueError, match="too early"):
        decode_plan(data[: cut % len(data)])


def test_trailing_bytes_are_refused():
    with pytest.raises(ValueError, match="3 bytes too many"):
        decode_plan(encode_plan(StepPlan(index=1), 0) + b"abc")


def test_another_version_is_refused():
    data = bytearray(encode_plan(StepPlan(index=1), 0))
    data[0] = 99
    with pytest.raises(ValueError, match="wire format 99"):
        decode_plan(bytes(data))
