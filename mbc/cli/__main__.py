"""The command `mbc` as `python -m mbc.cli`."""

import sys

from mbc.cli import main

sys.exit(main())
