"""The command `mbc place`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mbc.cli.outputs import check_outputs
from mbc.progress import busy


def run(arguments: argparse.Namespace) -> int:
    """Print or write the blocks of a file with their offsets, and print the height that they reach."""
    check_outputs({"-o": arguments.output}, {"the file of blocks": arguments.blocks})
    from mbc.optimize.placement.block_file import place_named, placed_text, read_blocks
    from mbc.optimize.schedule.liveness import peak_bytes
    from mbc.report.html.render import check_writable, write_text

    output: str | None = arguments.output
    if output is not None:
        check_writable(Path(output))
    named = read_blocks(Path(arguments.blocks))
    with busy(f"placing {arguments.blocks}"):
        offsets, height = place_named(named, arguments.capacity)
    text = placed_text(named, offsets)
    peak = peak_bytes(named.blocks)[0] if named.blocks else 0
    above = f"{height / peak - 1:.2%} above" if height > peak else "equal to"
    line = f"{len(offsets)} blocks reach {height}, {above} the most that is live at once"
    if output is None:
        print(text, end="")
        print(line, file=sys.stderr)
    else:
        write_text(Path(output), text)
        print(f"{output}: {line}")
    return 0
