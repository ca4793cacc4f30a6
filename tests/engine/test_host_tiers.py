"""Pages that left the device come back from RAM and disk byte for byte, and a tier that fails costs no request."""

import errno
import os
import stat

import pytest

from arbi_core import LLM, SamplingParams
from arbi_core.errors import ConfigError
from arbi_core.runner.blob_files import BlobFiles

PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
PAGE = 4 * 2 * 8 * 2 * 16 * 4
"""Bytes: layers, sides, tokens, heads, head dim, float32."""

SMALL = {"page_size": 8, "num_pages": 30, "max_model_len": 200}


def prompt(seed):
    return {"prompt_token_ids": [5 + (seed * 37 + i * 11) % 290 for i in range(150)]}


def rounds(llm, count=4):
    """Every prompt twice, in turn: by the time that one comes again the pool has long given its pages away."""
    answers = []
    for _ in range(2):
        for seed in range(count):
            answers += llm.generate(prompt(seed), PARAMS, use_tqdm=False)
    return [(a.outputs[0].token_ids, a.num_cached_tokens) for a in answers]


@pytest.fixture(scope="module")
def expected(tiny_text_dir):
    with LLM(str(tiny_text_dir), enable_prefix_caching=False) as llm:
        return [ids for ids, _ in rounds(llm)]


def test_without_a_tier_evicted_pages_are_computed_again(tiny_text_dir, expected):
    with LLM(str(tiny_text_dir), **SMALL) as llm:
        answers = rounds(llm)
    assert [ids for ids, _ in answers] == expected
    assert [cached for _, cached in answers] == [0] * 8


def test_evicted_pages_come_back_from_ram(tiny_text_dir, expected):
    with LLM(str(tiny_text_dir), host_tier_gib=0.05, **SMALL) as llm:
        answers = rounds(llm)
        stats = llm.stats
    assert [ids for ids, _ in answers] == expected
    assert [cached for _, cached in answers] == [0] * 4 + [144] * 4
    assert stats.tier_restored > 0
    assert stats.tier_ram_bytes > 0


@pytest.mark.parametrize("encrypt", [False, True])
def test_evicted_pages_come_back_from_disk(tiny_text_dir, expected, tmp_path, encrypt):
    """The RAM tier holds the pages of one prompt only."""
    options = {
        "host_tier_gib": 24 * PAGE / 2**30,
        "disk_tier_dir": str(tmp_path / "tier"),
        "disk_tier_min_tokens": 0,
        "disk_tier_encrypt": encrypt,
    }
    with LLM(str(tiny_text_dir), **options, **SMALL) as llm:
        answers = rounds(llm)
        stats = llm.stats
        (private,) = (tmp_path / "tier").iterdir()
        assert stat.S_IMODE(private.stat().st_mode) == 0o700
        files = [f for f in private.iterdir() if f.suffix == ".blob"]
        assert files
        assert {stat.S_IMODE(f.stat().st_mode) for f in files} == {0o600}
    assert [ids for ids, _ in answers] == expected
    assert [cached for _, cached in answers[4:]] == [144] * 4
    assert stats.tier_disk_bytes > 0
    assert not list((tmp_path / "tier").iterdir()), "nothing is left behind"


def test_a_full_disk_switches_the_disk_tier_off_and_loses_no_request(
    tiny_text_dir, expected, tmp_path, monkeypatch, caplog
):
    def full(self, handle, payload):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(BlobFiles, "write", full)
    with LLM(
        str(tiny_text_dir),
        host_tier_gib=24 * PAGE / 2**30,
        disk_tier_dir=str(tmp_path / "tier"),
        disk_tier_min_tokens=0,
        **SMALL,
    ) as llm:
        answers = rounds(llm)
        stats = llm.stats
    assert [ids for ids, _ in answers] == expected
    assert "No space left" in stats.tier_disk_error
    assert any("No space left" in r.message for r in caplog.records)


def test_settings_that_contradict_each_other_are_refused(tiny_text_dir, tmp_path):
    with pytest.raises(ConfigError, match="host-tier-gib"):
        LLM(str(tiny_text_dir), disk_tier_dir=str(tmp_path))
    with pytest.raises(ConfigError, match="prefix caching"):
        LLM(str(tiny_text_dir), host_tier_gib=1.0, enable_prefix_caching=False)
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    with pytest.raises(ConfigError, match="disk_tier_dir"):
        LLM(str(tiny_text_dir), host_tier_gib=0.1, disk_tier_dir=str(open_to_all))
