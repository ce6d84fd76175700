"""A generated package needs only NumPy, safetensors and mbc's runtime."""

import subprocess
import sys
from pathlib import Path

from mbc.plan.file import dump_plan
from tests.runtime.nets import small_plan

PROGRAM = """
import sys
from mbc.runtime.module import Module
import numpy as np
net = Module(sys.argv[1], device="cpu")
net.step(np.zeros((6, 2, 6, 6), np.float32), np.zeros(6, int), lr=0.1)
net.forward(np.zeros((2, 2, 6, 6), np.float32))
net.save(sys.argv[1] + "/weights"); net.load(sys.argv[1] + "/weights")
foreign = {"lark", "ortools", "jinja2", "pycuda", "torch", "scipy", "sklearn", "pandas"}
print(sorted(foreign & set(sys.modules)))
"""


def test_running_imports_no_compiler(tmp_path: Path):
    (tmp_path / "plan.json").write_text(dump_plan(small_plan()))
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
