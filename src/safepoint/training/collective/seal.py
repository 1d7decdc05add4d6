"""Authenticates the messages between ranks (HMAC-SHA256), so that no rank unpickles bytes of other programs.

gloo does not authenticate peers: a program that connects instead of a rank could send any bytes. The ranks agree on a
key through the job's store, which other programs cannot read (`training/rendezvous`).

In this module, to seal a message means to add an authentication code. To open a message means to check this code, and
to unpickle the value. (For files, to seal has another meaning: see docs/glossary.md.)
"""

import hmac
import pickle
import secrets
from typing import Any

import torch.distributed

_KEY = "safepoint/seal"
_MAC_BYTES = 32


class SealError(RuntimeError):
    """A message names a rank as its sender, but that rank did not seal it."""


class Seal:
    """Seals and opens the messages of one process group.

    Every rank must take part in the same exchanges, in the same order: the authentication code of a message covers
    the number of the exchange.
    """

    def __init__(self) -> None:
        c10d: Any = torch.distributed.distributed_c10d
        store = c10d._get_default_store()
        self._key: bytes = store.compare_set(_KEY, "", secrets.token_hex(32))
        self._num_exchanges = 0

    def close(self, value: Any, sender: int) -> bytes:
        """Return a sealed message that holds `value`, to be sent by rank `sender`."""
        body = pickle.dumps(value)
        return self._mac(body, sender) + body

    def open_all(self, messages: list[bytes]) -> list[Any]:
        """Return the values of the messages of one exchange. A message from an earlier exchange is refused.

        Args:
            messages: the messages, in the order of the ranks that sent them, from rank 0.

        Raises:
            SealError: a message was not sealed by the rank at its position, or not in this exchange. No message was
                unpickled.
        """
        bodies = [message[_MAC_BYTES:] for message in messages]
        for rank, (message, body) in enumerate(zip(messages, bodies, strict=True)):
            if not hmac.compare_digest(message[:_MAC_BYTES], self._mac(body, rank)):
                raise SealError(f"a message in the name of rank {rank} that rank {rank} has not sent")
        self._num_exchanges += 1
        return [pickle.loads(body) for body in bodies]

    def derive(self, purpose: bytes) -> bytes:
        """Derive a secret for another purpose from the ranks' key. The secret is the same on all ranks."""
        return hmac.digest(self._key, purpose, "sha256")

    def _mac(self, body: bytes, sender: int) -> bytes:
        return hmac.digest(self._key, f"{self._num_exchanges} {sender} ".encode() + body, "sha256")
