"""How busy other processes kept the host: a host time taken beside them is not the op's."""

import os
import time
from pathlib import Path

STAT = Path("/proc/stat")


def busy_seconds():
    """Seconds that all cores have worked since the machine started, or None where the system does not say."""
    try:
        user, nice, system, _, _, irq, softirq, steal = map(int, STAT.read_text().splitlines()[0].split()[1:9])
    except (OSError, ValueError, IndexError):
        return None
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


class HostLoad:
    """From its making on."""

    def __init__(self):
        self.start, self.busy, self.own = time.monotonic(), busy_seconds(), self._own_seconds()

    @staticmethod
    def _own_seconds():
        t = os.times()
        return t.user + t.system + t.children_user + t.children_system

    def others_busy_cores(self):
        """Cores' worth of work of other processes, on average; None where the system does not say."""
        wall, busy = time.monotonic() - self.start, busy_seconds()
        if busy is None or self.busy is None or not wall:
            return None
        return round(max(0.0, busy - self.busy - (self._own_seconds() - self.own)) / wall, 2)
