"""MoCo v2: its loss, and the method as the loop runs it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vissl_zero import collectives
from vissl_zero.methods.embedding import EmbeddingMethod, crops_of, images_of
from vissl_zero.methods.gather import at_least_float32
from vissl_zero.methods.method import Batch
from vissl_zero.methods.moco_v2.keys import MoCoLossConfig
from vissl_zero.registry import LOSSES


def info_nce(queries: Tensor, keys: Tensor, queue: Tensor, temperature: float) -> Tensor:
    """Cross-entropy of finding an image's own key among it and the keys in the queue.

    Args:
        queries: (n, D), from the student; not normalised.
        keys: (n, D), from the momentum encoder; not normalised; no gradient goes into them.
        queue: (K, D) unit vectors, the same on every rank.
        temperature: divides the cosine similarities.
    Returns:
        0-d, the mean over this rank's samples. No communication.
    """
    queries = F.normalize(at_least_float32(queries), dim=1)
    keys = F.normalize(at_least_float32(keys.detach()), dim=1)
    positive = (queries * keys).sum(dim=1, keepdim=True)
    logits = torch.cat((positive, queries @ queue.to(queries.dtype).T), dim=1) / temperature
    return (torch.logsumexp(logits, dim=1) - logits[:, 0]).sum() / max(len(queries), 1)


class KeyQueue(nn.Module):
    """The keys of the last micro-batches of all ranks, a ring, identical on every rank.

    It starts with random unit vectors, as in MoCo.

    Args:
        length: keys kept, K.
        embedding_dim: D.
        seed: of the first, random keys.

    Attributes:
        keys: buffer (K, D), unit rows.
        position: buffer, 0-d int64; row that the next key will take.
    """

    keys: Tensor
    position: Tensor

    def __init__(self, length: int, embedding_dim: int, seed: int = 0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.register_buffer("keys", F.normalize(torch.randn(length, embedding_dim, generator=generator), dim=1))
        self.register_buffer("position", torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def push(self, keys: Tensor) -> None:
        """Replace the oldest keys by those of all ranks, in the order of samples. Collective.

        Args:
            keys: (n, D) of this rank; not normalised; n may differ between ranks.
        Cost: see ``collectives.all_gather_rows``.
        """
        # A step that the loss scaler will skip may hold infinities; they must not stay for K samples.
        finite = torch.nan_to_num(keys.to(self.keys.dtype), nan=0.0, posinf=0.0, neginf=0.0)
        newest = collectives.all_gather_rows(F.normalize(finite, dim=1))
        length = len(self.keys)
        rows = (self.position + torch.arange(len(newest), device=newest.device)) % length
        self.keys.index_copy_(0, rows[-length:], newest[-length:])
        self.position.copy_((self.position + len(newest)) % length)


@LOSSES.register("moco_loss", config=MoCoLossConfig)
class MoCoV2(EmbeddingMethod):
    """MoCo v2: InfoNCE against a queue of the teacher's keys.

    The student sees the first crop, the teacher the second. Batch norm over one batch of all ranks
    (``SYNC_BN_CONFIG``) stands in for MoCo's shuffling of the batch.

    Args: the fields of ``MoCoLossConfig``, with embedding_dim known.
    """

    has_teacher = True

    def __init__(self, embedding_dim: int, queue_size: int = 65536, momentum: float = 0.999, temperature: float = 0.2):
        super().__init__()
        self.queue = KeyQueue(queue_size, embedding_dim)
        self.constant_momentum = momentum
        self.temperature = temperature
        self._keys: Tensor | None = None

    def run_student(self, model: nn.Module, batch: Batch) -> list[Any]:
        """Queries: the first crop."""
        outputs: list[Any] = model(images_of(batch, [0]))
        return outputs

    def run_teacher(self, model: nn.Module, batch: Batch) -> list[Any]:
        """Keys: the second crop."""
        outputs: list[Any] = model(images_of(batch, [1]))
        return outputs

    def forward(self, outputs: list[Any], batch: Batch, taught: list[Any]) -> Tensor:
        """The mean over this rank's samples; see ``info_nce``."""
        (queries,), (keys,) = crops_of(outputs[0], 1, batch), crops_of(taught[0], 1, batch)
        self._note(queries)
        self._keys = keys
        return info_nce(queries, keys, self.queue.keys, self.temperature)

    def after_micro_batch(self, outputs: list[Any], batch: Batch) -> None:
        """Queue the keys. Collective."""
        assert self._keys is not None
        self.queue.push(self._keys)

    def momentum(self, step: int) -> float:
        """See ``Method``."""
        return self.constant_momentum
