"""The Triton kernels compile for a GPU also where there is none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_every_kernel_compiles_for_hopper(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is not installed on this platform")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "tests.kernels.compile_kernels"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    source = "".join(path.read_text() for path in (root / "kernels").glob("*.py"))
    assert len(set(done.stdout.split())) == source.count("@triton.jit")
