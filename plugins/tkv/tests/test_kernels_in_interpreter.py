"""Runs the tests of the kernels by Triton's interpreter where there is no GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

HERE = Path(__file__).parent
FILES = ("test_paged_kernels.py", "test_paged_op.py", "test_tkv_kernels.py")


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="these tests run as they are")
@pytest.mark.skipif(torch.cuda.is_available(), reason="these tests run on the GPU as they are")
@pytest.mark.parametrize("file", FILES)
def test_kernels_in_the_interpreter(file):
    """In a process of its own: whether Triton interprets is decided when it is imported."""
    paths = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu", str(HERE / file)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=HERE.parents[2])
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
