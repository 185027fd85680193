"""What a process and its descendants cost, as the kernel counts it."""

import os
from pathlib import Path

TICKS_PER_SEC = os.sysconf("SC_CLK_TCK")


def cpu_secs(pid: int) -> float:
    """User and system time of the process and all below it, ended children included."""
    return sum(ticks for _, ticks in _family(pid).values()) / TICKS_PER_SEC


def rss_peak_mb(pid: int) -> float:
    """The highest peak among the process and all below it."""
    return max(_peak_mb(member) for member in _family(pid))


def _family(pid: int) -> dict[int, tuple[int, int]]:
    """Parent and ticks of the process and its descendants."""
    everyone = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                # The command's name may hold spaces: fields are counted from its bracket.
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            everyone[int(entry.name)] = (int(fields[1]), sum(map(int, fields[11:15])))
    members = {pid}
    while found := {n for n, (parent, _) in everyone.items() if parent in members} - members:
        members |= found
    return {member: everyone[member] for member in members if member in everyone}


def _peak_mb(pid: int) -> float:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    # A process that has ended and waits for its parent has no memory to tell of.
    return int((status.partition("VmHWM:")[2].split() or ["0"])[0]) / 1024
