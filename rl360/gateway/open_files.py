"""How many files this process may have open: a connection is one, and sessions by the thousand have two each.

In: nothing. Out: the limit that the machine allows, where a shell's usual one (1024) would be used up by 500 agents,
whose engines then look as if they refused connections. Children have it, too.
"""

from __future__ import annotations

import errno
import resource

USED_UP = (errno.EMFILE, errno.ENFILE)  # of an OSError: this process's, or the machine's


def allow_many() -> int:
    """Raise the soft limit to the hard one; what it is now."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
