"""The order of requests that are all there from the start."""

from jaxgen.schedule.order import longest_first


def test_long_answers_come_first_and_equals_stay_in_order():
    assert longest_first([3, None, 7, 3, None, 7, 1]) == [1, 4, 2, 5, 0, 3, 6]
    assert longest_first([]) == []
