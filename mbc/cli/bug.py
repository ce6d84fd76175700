"""What is said of an exception that nobody foresaw: the machine is at fault, or mbc."""

from __future__ import annotations

import errno
import platform
import shlex
import traceback
from collections.abc import Sequence

from mbc.errors import MbcError
from mbc.version import __version__

# What files, their names, rights and space can be at fault for; the rest are mistakes in the calls.
_OF_FILES = frozenset({
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP, errno.EISDIR, errno.ENOTDIR, errno.ENOSPC,
    errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN,
})  # fmt: skip


def of_machine(error: Exception) -> MbcError | None:
    """MBC241 or MBC242 where the machine refused a file or memory; None where it did not."""
    if isinstance(error, OSError) and error.errno in _OF_FILES:
        file = "a file" if error.filename is None else f"'{error.filename}'"
        return MbcError("MBC241", f"cannot use {file}: {error.strerror}", "check its name, its permissions, the space")
    if isinstance(error, MemoryError):
        reason = f" ({error})" if str(error) else ""
        remedy = "lower the batch, end other programs, or use a machine with more memory"
        return MbcError("MBC242", f"this machine has too little memory for that{reason}", remedy)
    return None


def report(error: Exception, words: Sequence[str]) -> str:
    """The traceback, that it is a bug, and what to report of it."""
    trace = "".join(traceback.format_exception(error)).rstrip()
    return (
        f"{trace}\n\n"
        "This is a bug in mbc: whatever it was given, it should not end so. Please report it with the lines above, "
        "the\nsource or the plan, and these:\n"
        f"  mbc      {__version__}\n"
        f"  command  {shlex.join(('mbc', *words))}\n"
        f"  Python   {platform.python_version()} on {platform.platform()}"
    )
