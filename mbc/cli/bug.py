"""Messages for unexpected exceptions: the cause is the machine, or a bug in mbc."""

from __future__ import annotations

import errno
import platform
import shlex
import traceback
from collections.abc import Sequence

from mbc.errors import MbcError
from mbc.version import __version__

# Errors of file names, permissions and space; all other codes are mistakes in mbc's calls.
_OF_FILES = frozenset({
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP, errno.EISDIR, errno.ENOTDIR, errno.ENOSPC,
    errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN,
})  # fmt: skip


def of_machine(error: Exception) -> MbcError | None:
    """Return MBC241 or MBC242 if the machine refused a file or memory, else None."""
    if isinstance(error, OSError) and error.errno in _OF_FILES:
        file = "a file" if error.filename is None else f"'{error.filename}'"
        return MbcError("MBC241", f"cannot use {file}: {error.strerror}", "check its name, its permissions, the space")
    if isinstance(error, MemoryError):
        reason = f" ({error})" if str(error) else ""
        remedy = "lower the batch, end other programs, or use a machine with more memory"
        return MbcError("MBC242", f"this machine has too little memory for that{reason}", remedy)
    return None


def report(error: Exception, words: Sequence[str]) -> str:
    """Return a text with the traceback, the statement that it is a bug, and the facts to report."""
    trace = "".join(traceback.format_exception(error)).rstrip()
    return (
        f"{trace}\n\n"
        "This is a bug in mbc: no input should end it like this. Please report it with the lines above, the source\n"
        "or the plan, and these facts:\n"
        f"  mbc      {__version__}\n"
        f"  command  {shlex.join(('mbc', *words))}\n"
        f"  Python   {platform.python_version()} on {platform.platform()}"
    )
