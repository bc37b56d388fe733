"""torch's Store over ``KeyValueServer``: what the ranks of several machines meet through."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from vissl_zero.launch.key_value_client import Client


class NetworkStore(dist.Store):
    """See the module. The C++ side of torch calls these methods, from any thread."""

    def __init__(self, client: Client, timeout_s: float):
        super().__init__()
        self._client = client
        self._timeout_s = timeout_s

    def set(self, key: str, value: str | bytes) -> None:
        """Store a value."""
        self._client.call(b"set", key.encode(), value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        """Wait for a key and give its value."""
        self.wait([key], timedelta(seconds=self._timeout_s))
        return self._client.call(b"get", key.encode())[0]

    def add(self, key: str, amount: int) -> int:
        """Add to a counter. Returns its new value."""
        return int(self._client.call(b"add", key.encode(), str(amount).encode())[0])

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Replace a value if it is as expected. Returns the value after that."""
        words = [word.encode() if isinstance(word, str) else bytes(word) for word in (key, expected, desired)]
        return self._client.call(b"swap", *words)[0]

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        return self._client.call(b"check", *(key.encode() for key in keys))[0] == b"1"

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there.

        Raises:
            dist.DistStoreError: they are not, in time.
        """
        limit = timeout.total_seconds() if timeout is not None else self._timeout_s
        words = [str(limit).encode(), *(key.encode() for key in keys)]
        if self._client.call(b"wait", *words, answer_within_s=limit + 5.0)[0] != b"1":
            raise dist.DistStoreError(f"no value of {', '.join(keys)} within {limit:g} s: a rank is missing")

    def delete_key(self, key: str) -> bool:
        """Remove a key. Returns whether it was there."""
        return self._client.call(b"delete", key.encode())[0] == b"1"

    def num_keys(self) -> int:
        """How many there are."""
        return int(self._client.call(b"count")[0])

    def has_extended_api(self) -> bool:
        """No append, multi_get and multi_set: torch does without them."""
        return False

    def clone(self) -> NetworkStore:
        """The same store; calls never share a connection."""
        return self
