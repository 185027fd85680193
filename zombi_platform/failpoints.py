"""Named places between two steps at which tests make a process die, freeze or fail.

Nothing happens unless an entry point armed them from the setting, such as
`commit.done=kill,stage.written=error:3` (the third pass). A pass costs one look into an
empty dictionary.
"""

from __future__ import annotations

import os
import signal
from typing import Final

from zombi_platform.errors import SettingsError, TransientError

ACTIONS: Final = ("kill", "stop", "error")

_armed: dict[str, tuple[str, int]] = {}


class FailpointError(TransientError):
    code = "FAILPOINT"


def arm(text: str | None) -> None:
    """Arm what the setting names; entry points call it once."""
    _armed.clear()
    for item in filter(None, (text or "").split(",")):
        name, _, rest = item.partition("=")
        action, _, passes = rest.partition(":")
        if action not in ACTIONS or not (passes or "1").isdigit():
            raise SettingsError(
                f"ZOMBI_FAILPOINTS: {item!r} is not name={'|'.join(ACTIONS)}[:pass]"
            )
        _armed[name] = (action, int(passes or "1"))


def failpoint(name: str) -> None:
    """Do what was armed for this place, once, when its pass has come."""
    if name not in _armed:
        return
    action, passes = _armed[name]
    if passes > 1:
        _armed[name] = (action, passes - 1)
        return
    del _armed[name]
    if action == "error":
        raise FailpointError(f"failpoint {name}")
    os.kill(os.getpid(), signal.SIGKILL if action == "kill" else signal.SIGSTOP)
