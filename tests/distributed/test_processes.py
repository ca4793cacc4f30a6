"""Real processes: what two ranks generate, and what becomes of rank 0 when the other fails."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from arbi_core import LLM, SamplingParams
from arbi_core.config.tree import CacheConfig, ModelConfig, SchedulerConfig, ServerConfig
from arbi_core.distributed import launch, workers
from arbi_core.errors import ConfigError, EngineFailedError, RankFailedError

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds worker processes through /proc")


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in launch.TORCHRUN:
        monkeypatch.delenv(name, raising=False)


def config(path, ranks, *, async_output="off", timeout_s=20.0, device="cpu"):
    return ServerConfig(
        model=ModelConfig(path=str(path), skip_tokenizer_init=True, max_model_len=128, device=device),
        cache=CacheConfig(num_pages=24),
        scheduler=SchedulerConfig(
            tensor_parallel_size=ranks, async_output=async_output, rank_timeout_s=timeout_s, max_num_batched_tokens=64
        ),
    )


def llm(path, ranks, **options):
    return LLM(str(path), config=config(path, ranks, **options))


def children():
    """Ids of this process's live children."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        found |= {int(p) for p in (task / "children").read_text().split()}
    return found


PROMPTS = [{"prompt_token_ids": [5 + i] * 30 + [7, 8, 9 + i]} for i in range(6)]


def generate(engine):
    """Two rounds that share prefixes, in a pool too small for all; the second is full of history and draws."""
    common = {"ignore_eos": True, "detokenize": False}
    first = engine.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=40, **common), use_tqdm=False)
    second = [SamplingParams(temperature=0.8, top_p=0.9, seed=i, max_tokens=12, **common) for i in range(3)] + [
        SamplingParams(temperature=0, presence_penalty=1.0, logprobs=2, max_tokens=12, **common)
    ] * 3
    outputs = first + engine.generate(PROMPTS, second, use_tqdm=False)
    return [o.outputs[0].token_ids for o in outputs], [o.outputs[0].finish_reason for o in outputs]


@pytest.mark.parametrize(
    ("variant", "async_output"),
    [
        ("mistral", "off"),
        ("qwen3/tied-yarn", "on"),
        *(pytest.param(v, m, marks=pytest.mark.oracle) for v in ("llama", "qwen2", "smollm3") for m in ("on", "off")),
    ],
)
def test_two_ranks_generate_what_one_does(tiny_dir, variant, async_output):
    path = tiny_dir(variant)
    with llm(path, 1, async_output=async_output) as alone:
        expected = generate(alone)
    before = children()
    with llm(path, 2, async_output=async_output) as shared:
        assert len(children() - before) == 1
        found = generate(shared)
        stats = shared.stats
    assert found == expected
    assert set(found[1]) == {"length"}
    assert stats.preemptions > 0
    assert stats.cached_tokens > 0
    assert children() == before, "a worker outlives its engine"


@pytest.mark.parametrize("async_output", ["off", "on"])
def test_a_killed_rank_ends_every_request_with_the_reason(tiny_dir, async_output):
    before = children()
    engine = llm(tiny_dir("llama"), 2, async_output=async_output)
    (worker,) = children() - before
    killed = []

    def kill():
        killed.append(time.monotonic())
        os.kill(worker, signal.SIGKILL)

    timer = threading.Timer(0.5, kill)
    timer.start()
    params = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True, detokenize=False)
    outputs = engine.generate(PROMPTS * 20, params, use_tqdm=False)
    assert time.monotonic() - killed[0] < 5
    ends = {o.outputs[0].finish_reason for o in outputs}
    assert ends <= {"error", "length"}
    failed = next(o.outputs[0] for o in outputs if o.outputs[0].finish_reason == "error")
    assert "rank 1 was killed by SIGKILL" in failed.error
    with pytest.raises(EngineFailedError, match="rank 1 was killed by SIGKILL"):
        engine.generate(PROMPTS, params, use_tqdm=False)
    start = time.monotonic()
    engine.close()
    assert time.monotonic() - start < 5
    assert children() == before


def test_a_stopped_rank_is_lost_after_the_timeout(tiny_dir):
    before = children()
    engine = llm(tiny_dir("llama"), 2, timeout_s=2.0)
    (worker,) = children() - before
    os.kill(worker, signal.SIGSTOP)
    start = time.monotonic()
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    (output,) = engine.generate(PROMPTS[0], params, use_tqdm=False)
    assert time.monotonic() - start < 8
    assert output.outputs[0].finish_reason == "error"
    assert "rank 1 has" in output.outputs[0].error
    engine.close()
    assert children() == before


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("cannot load", r"rank 1 ended: WeightError: model\.layers\.3\.mlp\.down_proj\.weight is missing"),
        ("never joins", "rank 1 ended with status 3: the cable is cut"),
    ],
)
def test_a_rank_that_cannot_start_says_why(tiny_dir, monkeypatch, fault, message):
    monkeypatch.setattr(workers, "COMMAND", (sys.executable, str(Path(__file__).with_name("faulty_worker.py")), fault))
    before = children()
    with pytest.raises(RankFailedError, match=message):
        llm(tiny_dir("llama"), 2)
    assert children() == before


def test_a_rank_that_fails_in_a_step_gives_its_message(tiny_dir, monkeypatch):
    script = str(Path(__file__).with_name("faulty_worker.py"))
    monkeypatch.setattr(workers, "COMMAND", (sys.executable, script, "fails in a step"))
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, detokenize=False)
    with llm(tiny_dir("llama"), 2) as engine:
        (output,) = engine.generate(PROMPTS[0], params, use_tqdm=False)
    assert "rank 1 failed in step 4: RuntimeError: the device fell off the bus" in output.outputs[0].error


# -- torchrun -----------------------------------------------------------------------------------------------------------

SCRIPT = """
import json, sys
import torch
from arbi_core import SamplingParams
from arbi_core.config.tree import *
from arbi_core.distributed.config_json import read_config
from arbi_core.distributed.launch import torchrun_place
from arbi_core.distributed.worker import run_follower
from arbi_core.errors import ArbiError
from arbi_core.plugins import load_registry

config = read_config(json.loads(sys.argv[1]), load_registry())
try:
    if torchrun_place().rank:
        sys.exit(run_follower(config))
    from arbi_core import LLM
    with LLM(config.model.path, config=config) as llm:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
        print(json.dumps(llm.generate({"prompt_token_ids": [5, 6, 7]}, params, use_tqdm=False)[0].outputs[0].token_ids))
except ArbiError as exc:
    sys.exit(f"{type(exc).__name__}: {exc}")
"""


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def as_torchrun(configs):
    """Run the script once per configuration, with the variables that torchrun sets; (status, output, errors) of each."""
    from arbi_core.distributed.config_json import config_to_json

    common = {"WORLD_SIZE": str(len(configs)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, json.dumps(config_to_json(c))],
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, c in enumerate(configs)
    ]
    results = [p.communicate(timeout=90) for p in processes]
    return [(p.returncode, out, err) for p, (out, err) in zip(processes, results, strict=True)]


def test_ranks_of_torchrun_find_each_other(tiny_dir):
    path = tiny_dir("llama")
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    with llm(path, 1) as alone:
        expected = alone.generate({"prompt_token_ids": [5, 6, 7]}, params, use_tqdm=False)[0].outputs[0].token_ids
    (status, out, err), follower = as_torchrun([config(path, 2), config(path, 2)])
    assert status == 0, err
    assert json.loads(out) == expected
    assert follower[0] == 0, follower[2]


def test_torchrun_must_start_as_many_ranks_as_configured(tiny_dir, monkeypatch):
    for name, value in zip(launch.TORCHRUN, ("0", "4", "0", "127.0.0.1", "1"), strict=True):
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"torchrun started 4 ranks, the configuration wants 2 \(--tp 4\)"):
        llm(tiny_dir("llama"), 2)
