"""A batch dealt to processes."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dpformer.data import deal


@given(st.lists(st.integers(2, 201)), st.integers(1, 9))
def test_everybody_is_dealt_once_and_tokens_are_balanced(lengths, parts):
    users = np.flatnonzero(np.ones(len(lengths))) * 3 + 1
    dealt = deal(users, np.array(lengths, dtype=np.int64), parts)
    assert len(dealt) == parts
    assert sorted(np.concatenate(dealt).tolist()) == users.tolist()
    tokens = [sum(lengths[(user - 1) // 3] for user in part) for part in dealt]
    assert max(tokens) - min(tokens) <= max(lengths, default=0)
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 2
