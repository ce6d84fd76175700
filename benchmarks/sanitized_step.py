"""What sanitizer.sh runs: build a package, or take one step of it without a CUDA graph.

python benchmarks/sanitized_step.py build NAME PRECISION FOLDER | run FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

from modules import build, example, open_module, random_inputs, small


def main() -> None:
    if sys.argv[1] == "build":
        _, _, name, precision, folder = sys.argv
        job = small(example(name, ("train.precision", precision)), batch=4)
        built = build(job, Path(folder))
        if built.failed:
            raise SystemExit(built.failed)
        return
    module = open_module(Path(sys.argv[2]), "cuda", eager=True)
    graph = module.plan.graph
    inputs = random_inputs(graph)
    loss = float(module.step(*inputs, lr=1e-3))
    module.forward(*(inputs[graph.inputs.index(name)] for name in graph.infer_inputs))
    module.close()
    print(f"loss {loss}")


if __name__ == "__main__":
    main()
