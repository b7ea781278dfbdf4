"""Names of users inside a sandbox, read from its own /etc/passwd and /etc/group.

In: a user as tasks name it: a name, an id, or "name:group". Out: ids. Left to others: changing to them (namespace.py).
"""

from __future__ import annotations

from rl360.sandboxes.local import transfer
from rl360.sandboxes.local.plan import User
from rl360.sandboxes.local.syscalls import raise_hosts


class UnknownUser(ValueError):
    """The sandbox has no such user or group."""


def _rows(root_fd: int, path: str) -> list[list[str]]:
    try:
        text = transfer.read_small(root_fd, path).decode(errors="replace")
    except OSError as error:
        raise_hosts(error)
        return []
    return [row.split(":") for row in text.splitlines() if row.count(":") >= 3]


def find_user(root_fd: int, user: str | int) -> User:
    """Raises UnknownUser. A number that no row has stands for itself, with group 0, as in Docker."""
    try:
        return _find_user(root_fd, user)
    except UnknownUser:
        raise
    except ValueError as error:
        raise UnknownUser(f"user {user!r}: the sandbox's /etc/passwd or /etc/group is damaged: {error}") from error


def _find_user(root_fd: int, user: str | int) -> User:
    name, _, group = str(user).partition(":")
    passwd, groups = _rows(root_fd, "/etc/passwd"), _rows(root_fd, "/etc/group")
    row = next((r for r in passwd if r[0] == name or (name.isdigit() and r[2] == name)), None)
    if row is None and not name.isdigit():
        raise UnknownUser(f"user {name!r} is not in the sandbox's /etc/passwd")
    uid, gid = (int(row[2]), int(row[3])) if row else (int(name), 0)
    if group:
        found = next((r for r in groups if r[0] == group), None)
        if found is None and not group.isdigit():
            raise UnknownUser(f"group {group!r} is not in the sandbox's /etc/group")
        gid = int(found[2]) if found else int(group)
    member_of = tuple(int(r[2]) for r in groups if row and row[0] in r[3].split(","))
    return User(uid, gid, member_of)


def home_of(root_fd: int, user: User) -> str | None:
    """The home folder of a user, None when /etc/passwd has no such id."""
    row = next((r for r in _rows(root_fd, "/etc/passwd") if r[2] == str(user.uid)), None)
    return row[5] if row and len(row) > 5 else None
