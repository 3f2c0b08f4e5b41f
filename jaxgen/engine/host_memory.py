"""How much memory the host has left, as Linux says it."""

from pathlib import Path

_KERNEL = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")


def host_bytes_left(kernel: Path = _KERNEL, group: Path = _GROUP) -> int:
    """What the kernel could give without swapping, and this process's container allows.

    A terabyte where nobody says. What a container's files have in the page cache counts as left.
    """
    left = 1 << 40
    if kernel.is_file():
        lines = dict(line.split(":", 1) for line in kernel.read_text().splitlines() if ":" in line)
        if "MemAvailable" in lines:  # old kernels do not say
            left = int(lines["MemAvailable"].split()[0]) * 1024
    limit = _number(group / "memory.max")
    used = _number(group / "memory.current")
    if limit is None or used is None:
        return left
    return max(min(left, limit - used + _page_cache(group / "memory.stat")), 0)


def _number(path: Path) -> int | None:
    """None where there is no such file, or no limit in it."""
    text = path.read_text().strip() if path.is_file() else "max"
    return None if text == "max" else int(text)


def _page_cache(path: Path) -> int:
    if not path.is_file():
        return 0
    lines = dict(line.split() for line in path.read_text().splitlines())
    return int(lines.get("file", 0))
