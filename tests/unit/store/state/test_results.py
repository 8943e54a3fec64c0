from __future__ import annotations

import pytest

from tensorcast_dask.exceptions import Incomplete, Mismatch, NotFound
from tensorcast_dask.store.state.results import NEW, RUNNING, Results
from tensorcast_dask.tensors.ids import RequestId
from tensorcast_dask.tensors.messages import Done, Fault, Refused

RID = RequestId("r")


def test_a_repeat_gets_the_first_answer() -> None:
    results = Results(10.0)
    assert results.begin(RID, digest=1, now_s=0.0) is NEW
    assert results.begin(RID, digest=1, now_s=0.0) is RUNNING
    results.finish(RID, Done(nbytes=5), now_s=1.0)
    assert results.begin(RID, digest=1, now_s=10.9) == Done(nbytes=5)
    assert len(results) == 1


def test_another_payload_under_an_id_is_refused_also_while_it_runs() -> None:
    results = Results(10.0)
    results.begin(RID, digest=1, now_s=0.0)
    with pytest.raises(Mismatch):
        results.begin(RID, digest=2, now_s=0.0)
    results.finish(RID, Done(), now_s=0.0)
    with pytest.raises(Mismatch):
        results.begin(RID, digest=2, now_s=0.0)


def test_an_answer_ends_with_its_time() -> None:
    results = Results(10.0)
    results.begin(RID, digest=1, now_s=0.0)
    results.finish(RID, Done(), now_s=1.0)
    assert results.begin(RID, digest=2, now_s=11.0) is NEW
    assert results.running == 1


def test_a_refusal_is_kept_unless_a_new_try_may_help() -> None:
    results = Results(10.0)
    for error, kept in ((NotFound("no"), True), (Incomplete("not yet"), False)):
        rid = RequestId(error.kind)
        refused = Refused(fault=Fault.of(error))
        results.begin(rid, digest=1, now_s=0.0)
        results.finish(rid, refused, now_s=0.0)
        again = results.begin(rid, digest=1, now_s=0.0)
        assert again == (refused if kept else NEW)


def test_a_request_that_was_given_up_is_a_new_try() -> None:
    results = Results(10.0)
    results.begin(RID, digest=1, now_s=0.0)
    results.forget(RID)
    results.forget(RID)
    assert results.begin(RID, digest=2, now_s=0.0) is NEW
