"""Write mbc/data/aten_schemas.txt: the schemas that PyTorch publishes for its ATen operations.

The importer reads two things from them: which results and arguments share memory (alias annotations such as
`Tensor(a!)`), and the default of every argument. Run it where a newer PyTorch is installed:
python benchmarks/aten_schemas.py
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mbc.interchange.aten import RULES

TABLE = Path(__file__).resolve().parent.parent / "mbc" / "data" / "aten_schemas.txt"
# Operations that no exported model has: other devices' and formats' own, derivatives, complex numbers.
_OTHER = re.compile(
    r"backward|foreach|quantize|qint|dequant|sparse|cudnn|mkldnn|miopen|mps|fft|special_|linalg_|complex|conj|nested"
    r"|__|sym_|to_padded|ctc_|lstm|gru|rnn_|fbgemm|cuda|vulkan|fake_|record_|from_file|names?$|rename|align_"
)


def schemas() -> Iterator[str]:
    """Yield the schema of every operation of the table, as torch prints it, in the order of names."""
    torch: Any = importlib.import_module("torch")
    lines: set[str] = set()
    for schema in torch._C._jit_get_all_schemas():
        namespace, _, name = schema.name.partition("::")
        overload = schema.overload_name
        is_rule = f"aten.{name}.{overload or 'default'}" in RULES
        text = str(schema)
        is_out = overload == "out" or overload.endswith("_out") or schema.name.endswith("_out")
        is_other = name.startswith("_") or bool(_OTHER.search(name)) or "Dimname" in text
        if namespace == "aten" and "Tensor" in text and "..." not in text and not is_out and (is_rule or not is_other):
            lines.add(text.removeprefix("aten::"))
    yield from sorted(lines)


if __name__ == "__main__":
    TABLE.write_text("".join(f"{line}\n" for line in schemas()), encoding="utf-8")
    print(f"wrote {TABLE}")
