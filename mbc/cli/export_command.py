"""`mbc export`"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from mbc.cli.import_command import check_free


def run(arguments: argparse.Namespace) -> int:
    """Write the state_dict, say how many keys it has."""
    output = Path(arguments.output)
    check_free(output, arguments.force)
    from mbc.interchange.weights import export_weights

    count = export_weights(Path(arguments.checkpoint), Path(arguments.like), output)
    if arguments.json:
        print(json.dumps({"state_dict": str(output), "keys": count}, indent=2))
        return 0
    print(f"{output}: a state_dict of {count} keys")
    return 0
