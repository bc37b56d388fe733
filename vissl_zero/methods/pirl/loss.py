"""Pretext-invariant representations: PIRL (https://arxiv.org/abs/1912.01991, equation 5), on NPID's memory bank."""

from __future__ import annotations

from torch import Tensor

from vissl_zero.methods.npid.loss import MemoryBank, info_nce_loss, nce_loss


def pirl_loss(
    image: Tensor,
    transformed: Tensor,
    sample_ids: Tensor,
    bank: MemoryBank,
    num_negatives: int,
    temperature: float = 0.07,
    weight: float = 0.5,
    use_info_nce: bool = False,
) -> Tensor:
    """Both an image and its transformed version are told apart from other images by the memory bank.

    Args:
        image, transformed: (n, D) embeddings of this rank's samples, whole and as patches; not normalised.
        sample_ids: (n,) index of each image in the data set; ``set_random_key`` was given the same.
        bank: of all images; update it with ``image`` afterwards.
        num_negatives: images each one is contrasted with.
        temperature: divides the cosine similarities.
        weight: of the transformed version; the image has the rest.
        use_info_nce: cross-entropy instead of noise-contrastive estimation.
    Returns:
        0-d, the mean over this rank's samples. Collective in the first call only.
    """
    total = image.new_zeros(())
    for share, embeddings, layer in ((1 - weight, image, "image"), (weight, transformed, "transformed")):
        negatives = bank.draw_negatives(len(embeddings), num_negatives, f"memory_bank.{layer}")
        similarities = bank.similarities(embeddings, sample_ids, negatives)
        term = info_nce_loss(similarities, temperature) if use_info_nce else nce_loss(similarities, bank, temperature)
        total = total + share * term
    return total
