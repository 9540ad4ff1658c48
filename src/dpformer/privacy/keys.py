"""Keys of a run: one secret, from which the noise of every answer and every draw of users has its own key.

    noise    HMAC(secret, "noise", place, SHA-256 of the sum)     the same sum again: the same noise; another sum: other noise
    tag      HMAC(secret, "tag", place, SHA-256 of the sum)       by which the ledger recognises a replay
    sample   HMAC(secret, "sample", place)                        who is drawn
    dropout  HMAC(secret, "dropout", place)

`place` is the number of the answer in the ledger. After each answer secret <- SHA-256("next", secret), which cannot be undone:
a checkpoint does not reveal earlier noise. A ledger is published without the secret, so a tag confirms no guess about the data.
"""

import hashlib
import hmac
import os
import secrets
from typing import NoReturn

from dpformer.errors import PrivacyError


class Uncopied:
    """An object that is neither copied nor pickled: two copies would answer two queries for one charge."""

    def __reduce__(self) -> NoReturn:  # `copy` and `deepcopy` use it too
        raise PrivacyError(
            f"a {type(self).__name__} cannot be copied or pickled: its copy would answer again without a charge. Pass the object "
            "itself; in another process, resume the run from its folder"
        )


class Keys(Uncopied):
    """The secret of a run and its place in the ledger. With the secret, the noise of all later answers can be subtracted.

    seed (research only): the secret is SHA-256 of the seed, so the noise can be subtracted by anyone who has the seed.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._secret = secrets.token_bytes(32) if seed is None else hashlib.sha256(f"seed {seed}".encode()).digest()
        self.seeded = seed is not None
        self.place = 0
        self._process = os.getpid()

    def noise(self, array: str, digest: bytes) -> bytes:
        """The key of the noise on one array of the answer at this place; `digest` is of the whole sum."""
        return self._derive(b"noise", array.encode(), digest)

    def tag(self, name: str, digest: bytes) -> str:
        """The tag of the sum at this place, for the ledger, in hexadecimal."""
        return self._derive(b"tag", name.encode(), digest).hex()

    def sample(self) -> bytes:
        """The key of the draw of users at this place."""
        return self._derive(b"sample")

    def dropout(self) -> bytes:
        """The key of the dropout masks at this place."""
        return self._derive(b"dropout")

    def ratchet(self) -> None:
        """Move to the next place. The present secret is deleted."""
        self._secret = hashlib.sha256(b"next" + self._secret).digest()
        self.place += 1

    def state(self) -> dict[str, object]:
        """All that a resumed run needs, for JSON. Keep it secret: readable by its owner only, and deleted at the end."""
        return {"secret": self._secret.hex(), "place": self.place, "seeded": self.seeded}

    @classmethod
    def restored(cls, state: dict[str, object]) -> "Keys":
        """Continue from a `state`."""
        keys = cls.__new__(cls)
        try:
            keys._secret = bytes.fromhex(str(state["secret"]))
            keys.place, keys.seeded, keys._process = int(str(state["place"])), bool(state["seeded"]), os.getpid()
            if len(keys._secret) != 32 or keys.place < 0:
                raise ValueError("no 32 bytes, or a place below 0")
        except (KeyError, ValueError) as problem:
            raise PrivacyError(f"the keys of a checkpoint cannot be read ({problem}); it is damaged") from None
        return keys

    def _derive(self, *parts: bytes) -> bytes:
        if os.getpid() != self._process:
            raise PrivacyError("this process is a fork of the one with the keys; ask there, or resume the run here")
        message = b"".join(len(part).to_bytes(8, "little") + part for part in (*parts, b"%d" % self.place))
        return hmac.new(self._secret, message, hashlib.sha256).digest()
