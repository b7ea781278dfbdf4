"""How many files a process may have open: a connection is one, and a sandbox takes several.

In: nothing. Out: the limit that the machine allows, for a process whose sessions or sandboxes would use up a shell's
usual one (1024): engines then look as if they refused connections. Children have it, too. Standard library only.
"""

from __future__ import annotations

import errno
import resource

USED_UP = (errno.EMFILE, errno.ENFILE)  # of an OSError: this process's, or the machine's


def allow_many() -> None:
    """Raise this process's soft limit to the hard one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
