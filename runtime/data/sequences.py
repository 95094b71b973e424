"""TokenSequences: a flat row of tokens as an endless, shuffled stream of sequences with random access."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cost_models.errors import TitanPlanError

from .permutation import permuted


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenSequences:
    """Sequences of seq_len + 1 tokens that overlap by one: input is [:-1], label is [1:].

    Attributes:
        tokens: all tokens of the data, usually a memory map.
        seq_len: tokens that a sequence predicts.
        vocab_size: every token is below it.
        seed: with the epoch it gives the order.
        digest: equal where the tokens are equal, whatever machine made them: for checkpoints, and for ranks to compare.
        description: one line for the log.
    """

    tokens: NDArray[np.unsignedinteger[Any]]
    seq_len: int
    vocab_size: int
    seed: int
    digest: str = ""
    description: str = ""

    def __post_init__(self) -> None:
        if self.tokens.size <= self.seq_len:
            raise TitanPlanError(
                "C621",
                f"training.dataset holds {self.tokens.size} tokens, one sequence of seq_len {self.seq_len} "
                f"needs {self.seq_len} + 1 = {self.seq_len + 1}",
                "give more data, or a smaller training.seq_len",
            )

    @property
    def n_sequences(self) -> int:
        """Sequences of an epoch."""
        return (self.tokens.size - 1) // self.seq_len

    def sequence(self, index: int) -> NDArray[np.int64]:
        """Sequence `index` of the endless stream: its epoch is index // n_sequences.

        Returns:
            (seq_len + 1,), a copy.

        Raises:
            TitanPlanError: R741 a token that the model does not have: the cache was damaged.
        """
        epoch, number = divmod(index, self.n_sequences)
        start = permuted(number, self.n_sequences, seed=self.seed, epoch=epoch) * self.seq_len
        tokens = self.tokens[start : start + self.seq_len + 1].astype(np.int64)
        if tokens.max() >= self.vocab_size:  # on a device it would be an assert without any place
            problem = f"token {tokens.max()} in the token cache, vocab_size is {self.vocab_size}: the file is damaged"
            raise TitanPlanError("R741", problem, "delete the cache folder; it is built again")
        return tokens

    __call__ = sequence


def epochs_to_steps(epochs: int, n_sequences: int, global_batch: int) -> int:
    """Steps of a run over `epochs` epochs of `n_sequences` with `global_batch` sequences a step; at least 1."""
    return max(1, epochs * n_sequences // global_batch)
