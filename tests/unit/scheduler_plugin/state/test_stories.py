from __future__ import annotations

from tensorcast_dask.scheduler_plugin.state.stories import MAX_SUBJECTS, Stories


def test_a_line_is_told_of_each_of_its_subjects_with_its_age() -> None:
    stories = Stories(lines=4)
    stories.tell(1.0, ("x", "r1", ""), "version {} of {}", 3, "x{y}")
    assert stories.of("x", now_s=3.5) == ((2.5, "version 3 of x{y}"),)
    assert stories.of("r1", now_s=1.0) == ((0.0, "version 3 of x{y}"),)
    assert stories.of("nobody", now_s=1.0) == ()


def test_what_is_told_late_stands_where_it_happened() -> None:
    stories = Stories(lines=4)
    for at_s, line in ((1.0, "ordered"), (3.0, "ended"), (2.0, "asked"), (2.0, "left")):
        stories.tell(at_s, ("x",), line)
    told = [line for _, line in stories.of("x", now_s=4.0)]
    assert told == ["ordered", "asked", "left", "ended"]


def test_old_lines_and_old_subjects_give_way() -> None:
    stories = Stories(lines=2)
    for number in range(3):
        stories.tell(0.0, ("x",), "{}", number)
    assert [text for _, text in stories.of("x", now_s=0.0)] == ["1", "2"]
    for number in range(MAX_SUBJECTS):
        stories.tell(0.0, (f"s{number}",), "here")
    assert stories.of("x", now_s=0.0) == ()
    assert stories.of(f"s{MAX_SUBJECTS - 1}", now_s=0.0) != ()
