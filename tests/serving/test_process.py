"""What serving sets in its process, looked at in a process of its own."""

import subprocess
import sys

SETTLED = """
import gc, sys
from jaxgen.serving import settle_process

before = sys.getswitchinterval(), gc.get_threshold()
settle_process()
assert sys.getswitchinterval() < before[0] / 10
assert gc.get_threshold()[0] > before[1][0] and gc.get_freeze_count() > 1000
"""


def test_threads_have_short_turns_and_what_is_there_is_not_collected():
    subprocess.run([sys.executable, "-c", SETTLED], check=True, timeout=60)
