"""Jobs that survive: what was generated before a restart is not generated again, and the answer is the same."""

import json
import stat

import pytest

from arbi_core import SamplingParams
from arbi_core.config.load import from_values
from arbi_core.engine.boot import build_engine
from arbi_core.engine.messages import FinishReason, SubmitMsg
from arbi_core.errors import ConfigError, RequestError

PROMPT = tuple(range(20, 50))
SAMPLING = SamplingParams(temperature=0.9, max_tokens=30, ignore_eos=True)


def open_core(path, jobs, **values):
    directory = None if jobs is None else str(jobs)
    return build_engine(from_values({"model.path": str(path), "scheduler.jobs_dir": directory, **values})).core


def message(**changes):
    values = {"request_id": "r", "prompt_token_ids": PROMPT, "sampling": SAMPLING, "job_id": "night-shift"}
    return SubmitMsg(**{**values, **changes})


def run(core, steps=None):
    tokens, ends = [], []
    while core.has_work and (steps is None or steps > 0):
        batch = core.step()
        tokens += [t for out in batch.tokens for t in out.token_ids]
        ends += batch.finished
        steps = None if steps is None else steps - 1
    return tokens, ends


@pytest.fixture
def core(tiny_text_dir, tmp_path):
    cores = []

    def make(jobs=tmp_path / "jobs", **values):
        cores.append(open_core(tiny_text_dir, jobs, **values))
        return cores[-1]

    yield make
    for made in cores:
        made.close()


def files(tmp_path):
    return list((tmp_path / "jobs").glob("job-*"))


@pytest.mark.parametrize("mode", ["on", "off"])
def test_a_job_goes_on_after_a_restart(core, tmp_path, mode):
    """No seed is given: the job remembers the one that it drew with."""
    first = core(**{"scheduler.async_output": mode})
    first.submit(message())
    before, _ = run(first, steps=12)
    first.close()
    (file,) = files(tmp_path)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    seed = json.loads(file.read_text())["seed"]

    second = core(**{"model.seed": 99, "scheduler.async_output": mode})
    second.submit(message())
    replayed = [t for out in second.step().tokens for t in out.token_ids]
    assert replayed[: len(before)] == before
    rest, (end,) = run(second)
    assert (end.reason, end.completion_tokens) == (FinishReason.LENGTH, 30)
    assert second.stats().generated_tokens == 30 - len(json_output(replayed, before))
    assert not files(tmp_path)

    alone = core(jobs=None)
    alone.submit(
        message(job_id=None, sampling=SamplingParams(temperature=0.9, max_tokens=30, ignore_eos=True, seed=seed))
    )
    assert run(alone)[0] == replayed + rest


def json_output(replayed, before):
    """The tokens that were stored: those that the first run had shown."""
    return replayed[: len(before)]


def test_a_cancelled_job_keeps_its_progress_and_an_ended_one_leaves_nothing(core, tmp_path):
    engine = core()
    engine.submit(message())
    before, _ = run(engine, steps=8)
    engine.cancel("r")
    run(engine)
    assert len(files(tmp_path)) == 1
    engine.submit(message(request_id="again"))
    tokens, (end,) = run(engine)
    assert tokens[: len(before)] == before
    assert end.completion_tokens == len(tokens) == 30
    assert not files(tmp_path)


def test_what_a_job_id_cannot_mean_is_refused(core, tmp_path):
    engine = core()
    engine.submit(message())
    with pytest.raises(RequestError, match="already running") as refused:
        engine.submit(message(request_id="twin"))
    assert refused.value.status == 409
    engine.submit(message(request_id="other-tenant", tenant="b"))
    run(engine, steps=5)
    engine.cancel("r")
    run(engine, steps=1)
    with pytest.raises(RequestError, match="another prompt"):
        engine.submit(message(prompt_token_ids=PROMPT[1:]))
    with pytest.raises(RequestError, match="logprobs"):
        engine.submit(message(sampling=SamplingParams(max_tokens=3, logprobs=1)))
    with pytest.raises(RequestError, match="jobs_dir"):
        core(jobs=None).submit(message())


def test_a_damaged_file_starts_the_job_anew(core, tmp_path, caplog):
    engine = core()
    engine.submit(message())
    run(engine, steps=8)
    engine.cancel("r")
    run(engine)
    files(tmp_path)[0].write_text("{broken")
    engine.submit(message())
    tokens, _ = run(engine)
    assert len(tokens) == 30
    assert "starts anew" in caplog.text


def test_a_directory_that_others_may_write_is_refused(core, tmp_path):
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs").chmod(0o777)
    with pytest.raises(ConfigError, match="jobs_dir"):
        core()
