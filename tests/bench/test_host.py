"""`jaxgen bench host` measures whole decode steps, of the loop and of the scheduler alone."""

import json

from jaxgen.cli import main


def test_the_host_time_of_a_step(capsys):
    asked = {"--batch-size": 5, "--input-len": 70, "--output-len": 9}
    options = [str(word) for pair in asked.items() for word in pair]
    assert main(["bench", "host", *options, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["sequences"] == 5
    assert told["steps"] == 9
    assert told["schedule_and_pack_ms"] > 0
    assert 0 < told["step_ms"] <= told["step_p99_ms"]
    assert round(told["us_per_token"] * told["tokens_per_second"]) == 1_000_000
