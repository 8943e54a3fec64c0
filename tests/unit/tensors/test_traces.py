from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorcast_dask.scheduler_plugin.state.outcomes import number_of
from tensorcast_dask.tensors.ids import RequestId
from tensorcast_dask.tensors.traces import cause_of, rid_of

CAUSE = f"{0xABC:032x}-{0x9:016x}"


@given(number=st.integers(0, 1 << 53), cause=st.sampled_from(["", CAUSE]))
def test_an_id_tells_its_number_and_its_cause(number: int, cause: str) -> None:
    rid = rid_of("0f1e2d", number, cause)
    assert cause_of(rid) == cause
    assert number_of(RequestId(rid)) == number
    assert rid.startswith("0f1e2d:")


@pytest.mark.parametrize("rid", ["", "7", "a:7", "a:b:7", f"a:{CAUSE}", "a:b:c:7"])
def test_ids_of_others_tell_no_cause(rid: str) -> None:
    assert cause_of(rid) == ""
