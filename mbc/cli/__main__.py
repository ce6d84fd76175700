"""`python -m mbc.cli` is `mbc`."""

import sys

from mbc.cli import main

sys.exit(main())
