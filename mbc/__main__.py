"""The command `mbc` as `python -m mbc`."""

import sys

from mbc.cli import main

sys.exit(main())
