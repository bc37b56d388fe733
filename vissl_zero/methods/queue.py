"""The queue of past embeddings that joins SwAV's assignment when batches are small."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vissl_zero import collectives


class EmbeddingQueue(nn.Module):
    """One queue for the whole run, identical on every rank, newest samples first.

    Rows are ordered by micro-batch and, within one, by sample, whatever the number of ranks.

    Args:
        num_queues: independent queues, one per crop that is assigned (C).
        length: samples kept, L.
        embedding_dim: D.

    Attributes:
        embeddings: buffer (C, L, D); only the first ``num_filled`` of each queue are samples.
        num_filled: samples so far, at most L; equal on every rank.
    """

    embeddings: Tensor

    def __init__(self, num_queues: int, length: int, embedding_dim: int):
        super().__init__()
        self.register_buffer("embeddings", torch.zeros(num_queues, length, embedding_dim))
        # On the host: it decides shapes, and reading it from the device would wait for the device in every step.
        self.num_filled = 0

    @torch.no_grad()
    def push(self, embeddings: Tensor) -> None:
        """Put this micro-batch in front and drop the oldest. Collective; ranks hold consecutive parts of the batch.

        Args:
            embeddings: (C, n, D) of this rank's n samples; n may differ between ranks.
        Cost: two all-gathers (see ``all_gather_rows``); copies the queue once.
        """
        length = self.embeddings.shape[1]
        # A step that the loss scaler will skip may hold infinities; they must not stay for L samples.
        finite = torch.nan_to_num(embeddings.to(self.embeddings.dtype), nan=0.0, posinf=0.0, neginf=0.0)
        newest = collectives.all_gather_rows(finite.transpose(0, 1)).transpose(0, 1)
        self.embeddings.copy_(torch.cat((newest, self.embeddings), dim=1)[:, :length])
        self.num_filled = min(length, self.num_filled + newest.shape[1])

    def local_part(self) -> Tensor:
        """This rank's share (C, q, D) of the samples in the queue; shares are consecutive and differ by one at most."""
        rank, world_size = collectives.rank(), collectives.world_size()
        return self.embeddings[:, rank * self.num_filled // world_size : (rank + 1) * self.num_filled // world_size]

    def get_extra_state(self) -> Tensor:
        """``num_filled``, for ``state_dict``."""
        return torch.tensor(self.num_filled)

    def set_extra_state(self, state: Tensor) -> None:
        """``num_filled``, from ``load_state_dict``."""
        self.num_filled = int(state)
