"""Kernel tests are collected where their kernels can run; else `test_kernels_in_interpreter` runs them interpreted."""

import os

import torch

collect_ignore: list[str] = []
if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore = ["test_tkv_kernels.py"]  # its tensors are on the CPU
    if not torch.cuda.is_available():
        collect_ignore += ["test_paged_kernels.py", "test_paged_op.py"]
