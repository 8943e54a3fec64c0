from __future__ import annotations

from xml.etree import ElementTree as ET

from tensorcast_dask.notebook.drawing import as_svg
from tensorcast_dask.tensors.plans import PlanSpec
from tests.kit.plans import noop

SVG = "{http://www.w3.org/2000/svg}"


def test_a_picture_has_a_box_a_step_and_a_line_an_edge() -> None:
    spec = PlanSpec(
        steps=(
            noop("a<b> & 'c'"),
            noop("b"),
            noop("d", "a<b> & 'c'", "b"),
            noop("undo", compensates="b"),
        )
    ).check()
    says = {step.name: "noop on <any>" for step in spec.steps}
    drawn = ET.fromstring(as_svg(spec.steps, says))
    boxes = drawn.findall(f"{SVG}rect")
    tops = [int(box.attrib["y"]) for box in boxes]
    assert tops[0] == tops[1] < tops[2] == tops[3]
    assert [box.attrib.get("class") for box in boxes] == [None, None, None, "undo"]
    lefts = [int(box.attrib["x"]) + int(box.attrib["width"]) for box in boxes]
    assert lefts[0] < int(boxes[1].attrib["x"])
    assert int(drawn.attrib["width"]) > max(lefts)
    assert len(drawn.findall(f"{SVG}path")) == 3
    texts = [one.text for one in drawn.findall(f"{SVG}text")]
    assert texts[:2] == ["a<b> & 'c'", "noop on <any>"]


def test_a_plan_without_steps_is_an_empty_picture() -> None:
    assert not list(ET.fromstring(as_svg((), {})).iter(f"{SVG}rect"))
