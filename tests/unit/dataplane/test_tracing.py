"""What a process does that has no OpenTelemetry, or has it and records nothing."""

from __future__ import annotations

import sys

import pytest

from tensorcast_dask.dataplane import tracing
from tensorcast_dask.exceptions import Gone

CAUSE = f"{0xABC:032x}-{0x9:016x}"


@pytest.fixture(params=["absent", "nothing recorded"])
def process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "absent":
        monkeypatch.delitem(sys.modules, "opentelemetry.trace", raising=False)
        return
    from opentelemetry import trace

    monkeypatch.setitem(sys.modules, "opentelemetry.trace", trace)


@pytest.mark.parametrize("cause", [None, "", CAUSE, "what is it", "-"])
def test_a_span_changes_nothing(process: None, cause: str | None) -> None:
    with tracing.span("work", cause, number=3) as note:
        note("Gone")
        assert tracing.here() == (
            "" if cause != CAUSE or not tracing.active() else CAUSE
        )
    with pytest.raises(Gone, match="as it was"), tracing.span("work", cause):
        raise Gone("as it was")
    tracing.begin("work", cause or "")(None)
    tracing.begin("work", cause or "")("Gone")
    assert tracing.here() == ""
