"""The data of a page, read back from its text as its scripts read it."""

from __future__ import annotations

import json
import re
import zlib
from base64 import b64decode
from typing import Any


def data_of(page: str) -> dict[str, Any]:
    """Return the content of the page's data element."""
    (data,) = re.findall(r'<script type="text/plain" id="data">([A-Za-z0-9+/=]*)</script>', page)
    return json.loads(zlib.decompress(b64decode(data)))
