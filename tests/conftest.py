"""Shared fixtures: tiny checkpoints made on the spot, and the tools to look inside an engine."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
from support.tiny import TINY, make_checkpoint


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory):
    """Makes (once per variant) a tiny random checkpoint and returns its directory."""
    made = {}

    def get(variant: str) -> Path:
        if variant not in made:
            made[variant] = make_checkpoint(variant, tmp_path_factory.mktemp(variant.replace("/", "_")))
        return made[variant]

    get.variants = tuple(TINY)
    return get


@pytest.fixture(scope="session")
def tiny_text_dir(tiny_dir, tmp_path_factory):
    """A tiny Llama with a byte-level tokenizer and a chat template: enough to serve text."""
    import shutil

    from support.tokenizers import write_tokenizer_files

    target = tmp_path_factory.mktemp("tiny_text")
    shutil.copytree(tiny_dir("llama"), target, dirs_exist_ok=True)
    write_tokenizer_files(target)
    return target
