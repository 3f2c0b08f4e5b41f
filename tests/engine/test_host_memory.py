"""How much memory the host has left: the kernel's word, and the container's."""

import pytest

from jaxgen.engine.host_memory import host_bytes_left


@pytest.fixture
def machine(tmp_path):
    """A machine with 8 MB to give, in a container of these files."""
    (tmp_path / "meminfo").write_text("MemTotal: 16000 kB\nMemAvailable:    8000 kB\n")
    (tmp_path / "group").mkdir()

    def left(**files):
        for name, text in files.items():
            (tmp_path / "group" / f"memory.{name}").write_text(text)
        return host_bytes_left(tmp_path / "meminfo", tmp_path / "group")

    return left


def test_the_smaller_of_both_counts(machine):
    assert machine() == 8000 * 1024
    assert machine(max="max\n", current="5000\n") == 8000 * 1024
    assert machine(max="9000000000\n") == 8000 * 1024
    assert machine(max="12000\n") == 7000
    assert machine(stat="anon 2000\nfile 3000\n") == 10000  # files in memory make room
    assert machine(max="4000\n", stat="anon 5000\nfile 0\n") == 0


def test_where_nobody_says_there_is_enough(tmp_path):
    assert host_bytes_left(tmp_path / "none", tmp_path) == 1 << 40
    (tmp_path / "meminfo").write_text("MemTotal: 16000 kB\n")
    assert host_bytes_left(tmp_path / "meminfo", tmp_path) == 1 << 40
