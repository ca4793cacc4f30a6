"""Traces, cost, policies' rules and the account of fairness."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arbi_core.cli.main import main
from arbi_core.errors import ConfigError
from arbi_core.scheduler.shares import share_prefill
from arbi_core.simulator import PRESETS, WORKLOADS, make_workload, read_trace, write_trace
from arbi_core.simulator.cost import override
from arbi_core.simulator.fairness import FairShares, jain
from arbi_core.simulator.policies import SHARES, share_first
from arbi_core.simulator.trace import Stream, TraceRequest


@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_are_seeded_and_survive_a_file(name, tmp_path):
    trace = make_workload(name, 50, seed=7)
    assert trace == make_workload(name, 50, seed=7) != make_workload(name, 50, seed=8)
    assert len(trace) == pytest.approx(50, abs=2)
    assert max(r.total_tokens for r in trace) < PRESETS["h200-8b"].pool_tokens
    write_trace(tmp_path / "t.jsonl", trace)
    assert read_trace(tmp_path / "t.jsonl") == trace


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "t.jsonl:2: no JSON"),
        ("3", "not an object"),
        ('{"arrival_s": 0, "prompt_tokens": 3}', "output_tokens is missing"),
        ('{"arrival_s": 0, "prompt_tokens": 3, "output_tokens": 1, "size": 3}', "'size' is no field of a request"),
        ('{"arrival_s": 0, "prompt_tokens": 0, "output_tokens": 1}', "must be at least 1"),
        ('{"arrival_s": -1, "prompt_tokens": 1, "output_tokens": 1}', "arrival_s is -1"),
        ('{"arrival_s": 0, "prompt_tokens": 5, "output_tokens": 1, "prefix": [["a", 9]]}', "segments of prefix"),
        ('{"arrival_s": 0, "prompt_tokens": 5, "output_tokens": 1, "priority": "high"}', "not a valid Priority"),
        ('{"arrival_s": 0, "prompt_tokens": 5, "output_tokens": 1, "id": "1"}', "two requests have the id '1'"),
        ('{"arrival_s": 0, "prompt_tokens": 5, "output_tokens": 1, "after": "9"}', "waits for '9'"),
    ],
)
def test_bad_trace_lines_are_named(line, says, tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text('{"arrival_s": 0, "prompt_tokens": 3, "output_tokens": 1}\n' + line + "\n")
    with pytest.raises(ConfigError) as caught:
        read_trace(path)
    assert says in str(caught.value)


def test_streams_name_text_by_segment_and_position():
    stream = Stream()
    one = stream.prompt(
        TraceRequest(id="1", arrival_s=0, prompt_tokens=6, output_tokens=1, prefix=(("a", 2), ("b", 2)))
    )
    two = stream.prompt(
        TraceRequest(id="2", arrival_s=0, prompt_tokens=6, output_tokens=1, prefix=(("a", 2), ("c", 2)))
    )
    assert one[:2] == two[:2]
    assert len(set(one) | set(two)) == 10


@given(
    remaining=st.lists(st.integers(1, 5000), max_size=12),
    budget=st.integers(0, 4000),
    chunk=st.integers(1, 4000),
    data=st.data(),
)
def test_shares_never_exceed_what_there_is(remaining, budget, chunk, data):
    batch = sorted(data.draw(st.lists(st.booleans(), min_size=len(remaining), max_size=len(remaining))))
    limit = data.draw(st.none() | st.integers(0, budget))
    terms = {"batch": batch, "batch_budget": limit}
    own = share_prefill(remaining, budget, chunk, **terms)
    rejoining = share_first(4, rejoins=True)(remaining, budget, chunk, **terms)
    assert rejoining == own, "halves and eighth are to differ from the scheduler's in the part alone"
    for name, share in SHARES.items():
        given_ = share(remaining, budget, chunk, **terms)
        assert len(given_) == len(remaining), name
        assert all(0 <= g <= min(r, chunk) for g, r in zip(given_, remaining, strict=True)), name
        assert sum(given_) <= budget, name
        if limit is not None:
            assert sum(g for g, b in zip(given_, batch, strict=True) if b) <= limit, name
        elif chunk >= budget:
            assert sum(given_) == min(budget, sum(remaining)), f"{name} leaves tokens unused"


@pytest.mark.parametrize(
    ("name", "shares"),
    [
        ("quarter", [700, 100, 0]),
        ("halves", [700, 100, 0]),
        ("eighth", [100, 100, 600]),
        ("quarter-last", [200, 100, 500]),
        ("shortest", [0, 100, 700]),
        ("fcfs", [800, 0, 0]),
        ("equal", [350, 100, 350]),
    ],
)
def test_what_the_first_in_order_gets(name, shares):
    assert SHARES[name]([950, 100, 800], 800, 800) == shares


def test_only_the_last_keeps_the_first_to_its_part():
    assert next(iter(SHARES)) == "quarter"
    assert SHARES["quarter"] is share_prefill
    assert SHARES["quarter-last"]([900], 800, 800) == [800]
    assert SHARES["quarter-last"]([900, 100], 800, 800) == [700, 100]


def test_fair_shares_follow_weights_and_demand():
    shares = FairShares({"a": 1.0, "b": 3.0})
    shares.ask("a", 100)
    shares.ask("b", 30)
    shares.step({"a": 40.0}, 1.0)
    assert (shares.services["a"].fair, shares.services["b"].fair) == (10.0, 30.0)
    assert shares.services["b"].max_lag == 30.0
    assert shares.services["a"].progress == 4.0


def test_jain_index():
    assert jain([2.0, 2.0, 2.0]) == pytest.approx(1.0)
    assert jain([1.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)
    assert jain([1.0]) is None


def test_cost_terms_are_checked():
    assert override(PRESETS["h200-8b"].cost, ["row_s=0.5"]).row_s == 0.5
    for entry in ("rows=1", "row_s=x", "row_s=-1", "row_s"):
        with pytest.raises(ConfigError):
            override(PRESETS["h200-8b"].cost, [entry])


def test_command_prints_json_and_a_table(capsys, tmp_path):
    path = tmp_path / "t.jsonl"
    assert main(["simulate", "hog", "--requests", "30", "--write-trace", str(path)]) == 0
    assert main(["simulate", str(path), "--json"]) == 0
    from_file = json.loads(capsys.readouterr().out)
    assert main(["simulate", "hog", "--requests", "30", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == from_file
    assert from_file["finished"] == {"length": 30}
    assert {"p50", "p90", "p99"} <= set(from_file["tenants"]["hog"]["ttft_s"])
    assert main(["simulate", str(path), "--compare", "tenant_order"]) == 0
    table = capsys.readouterr().out
    assert "first token" in table
    assert "arrival" in table


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["nowhere"], "neither a workload nor a file"),
        (["hog", "--requests", "0"], "must be positive"),
        (["hog", "--page-size", "0"], "--page-size: 0 is too small"),
        (["hog", "--depth", "-1"], "--depth: -1 is too small"),
        (["hog", "--cost-term", "x=1"], "no term of the cost model"),
        (["mixed", "--num-pages", "10"], "the pool holds 160"),
        (["hog", "--tenant-limits", "nonsense"], "is no NAME:key=value"),
    ],
)
def test_bad_arguments_end_with_one_line(args, says, capsys):
    assert main(["simulate", *args]) == 1
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'{"arrival_s": 0, "prompt_tokens": 4.5, "output_tokens": 1}', "must be whole"),
        (b'{"arrival_s": 0, "prompt_tokens": true, "output_tokens": 1}', "must be whole"),
        (b'{"arrival_s": "x", "prompt_tokens": 4, "output_tokens": 1}', "arrival_s must be a number"),
        (b"\xfc\xfd", "UTF-8"),
    ],
)
def test_traces_that_are_none(tmp_path, content, says):
    (tmp_path / "t.jsonl").write_bytes(content)
    with pytest.raises(ConfigError, match=says):
        read_trace(tmp_path / "t.jsonl")
