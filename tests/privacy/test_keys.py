"""Keys: no two uses share one, a checkpoint tells nothing of what came before it, a fork asks in vain."""

import hashlib
import hmac
import itertools
import json
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpformer.errors import PrivacyError
from dpformer.privacy.keys import Keys

DIGEST, OTHER = hashlib.sha256(b"sum").digest(), hashlib.sha256(b"other sum").digest()


def all_keys(keys: Keys) -> dict[tuple, bytes]:
    """Every kind of key at the present place, for two arrays and two sums."""
    derived = {("sample",): keys.sample(), ("dropout",): keys.dropout()}
    for name, digest in itertools.product(("a", "b"), (DIGEST, OTHER)):
        derived["noise", name, digest] = keys.noise(name, digest)
        derived["tag", name, digest] = bytes.fromhex(keys.tag(name, digest))
    return derived


def test_the_derivation_is_hmac_with_lengths():
    """Written out once more from the definition."""
    keys = Keys(seed=3)
    keys.ratchet()
    secret = hashlib.sha256(b"next" + hashlib.sha256(b"seed 3").digest()).digest()
    parts = [b"noise", b"weights", DIGEST, b"1"]
    message = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    assert keys.noise("weights", DIGEST) == hmac.new(secret, message, "sha256").digest()


@given(st.lists(st.binary(max_size=6), max_size=4), st.lists(st.binary(max_size=6), max_size=4))
def test_no_two_lists_of_labels_collide(one, other):
    keys = Keys(seed=0)
    assert (keys._derive(*one) == keys._derive(*other)) == (one == other)


def test_labels_that_run_into_one_another_stay_apart():
    keys = Keys(seed=0)
    assert keys._derive(b"ab", b"c") != keys._derive(b"a", b"bc")
    assert keys._derive(b"a") != keys._derive(b"a", b"")
    keys.place = 11
    first = keys._derive(b"a", b"1")
    keys.place = 1
    assert keys._derive(b"a", b"1", b"1") != first != keys._derive(b"a", b"11")


def test_every_use_sum_array_and_place_has_a_key_of_its_own():
    keys, seen = Keys(), []
    for _ in range(5):
        seen += all_keys(keys).values()
        keys.ratchet()
    assert len(set(seen)) == len(seen) == 50


def test_another_place_alone_gives_other_keys():
    """Not only through the ratchet: the place is in the message too."""
    keys = Keys(seed=1)
    before = all_keys(keys)
    keys.place += 1
    assert not set(before.values()) & set(all_keys(keys).values())


def test_fresh_keys_differ_within_and_between_processes():
    assert Keys().sample() != Keys().sample()
    code = "from dpformer.privacy.keys import Keys; print(Keys().sample().hex())"
    outputs = {subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout for _ in range(2)}
    assert len(outputs) == 2
    assert "" not in outputs


def test_after_k_ratchets_a_fresh_one_ratcheted_and_a_restored_one_agree():
    first, second = Keys(seed=9), Keys(seed=9)
    for _ in range(4):
        first.ratchet()
    state = json.loads(json.dumps(first.state()))
    for _ in range(4):
        second.ratchet()
    assert first.place == 4
    assert all_keys(first) == all_keys(second) == all_keys(Keys.restored(state))


def test_the_ratchet_is_a_hash_and_the_state_holds_no_earlier_secret():
    """What a checkpoint at place k holds is SHA-256 of what place k - 1 had: all that is known is its image."""
    keys = Keys()
    secrets, derived = [], []
    for _ in range(4):
        secrets.append(keys.state()["secret"])
        derived.append(all_keys(keys))
        keys.ratchet()
    for before, after in itertools.pairwise([*secrets, keys.state()["secret"]]):
        assert after == hashlib.sha256(b"next" + bytes.fromhex(before)).hexdigest()
    state = keys.state()
    assert set(state) == {"secret", "place", "seeded"}
    assert not any(secret in json.dumps(state) for secret in secrets)
    assert not any(secret in repr(vars(keys)) or bytes.fromhex(secret) in vars(keys).values() for secret in secrets)
    # From the state, with any place written into it, none of the earlier keys comes out.
    for place, earlier in enumerate(derived):
        moved = all_keys(Keys.restored({**state, "place": place}))
        assert not set(moved.values()) & set(earlier.values())


def test_a_reversible_ratchet_would_be_seen():
    """The control: with a counter in place of the hash, a checkpoint gives the keys of before."""

    class Counting(Keys):
        def ratchet(self) -> None:
            self.place += 1

    keys = Counting()
    before = all_keys(keys)
    keys.ratchet()
    assert all_keys(Keys.restored({**keys.state(), "place": 0})) == before


def test_a_fork_is_refused():
    keys = Keys()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            keys.sample()
            os.write(write, b"a key")
        except PrivacyError as problem:
            os.write(write, str(problem).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert b"fork" in os.read(read, 1000)
    os.close(read)
    os.close(write)
    assert keys.sample()


def test_a_seed_is_repeatable_and_marked():
    assert all_keys(Keys(seed=5)) == all_keys(Keys(seed=5))
    assert all_keys(Keys(seed=5)) != all_keys(Keys(seed=6))
    assert Keys(seed=0).seeded
    assert not Keys().seeded
    assert Keys.restored(Keys(seed=0).state()).seeded
    assert not Keys.restored(Keys().state()).seeded


@pytest.mark.parametrize(
    "change",
    [{"secret": "00"}, {"secret": "zz" * 32}, {"secret": None}, {"place": -1}, {"place": "x"}, {"place": None}],
)
def test_a_damaged_state_is_refused(change):
    with pytest.raises(PrivacyError, match="damaged"):
        Keys.restored({**Keys().state(), **change})


@pytest.mark.parametrize("field", ["secret", "place", "seeded"])
def test_a_state_that_lacks_something_is_refused(field):
    state = Keys().state()
    del state[field]
    with pytest.raises(PrivacyError, match=field):
        Keys.restored(state)
