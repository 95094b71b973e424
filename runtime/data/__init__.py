"""Where training tokens come from: files, tokenizers, the token cache, the order of sequences, batches by position."""

from .dataset import check_dataset, open_tokens
from .loader import DataLoader
from .sequences import TokenSequences, epochs_to_steps

__all__ = ["DataLoader", "TokenSequences", "check_dataset", "epochs_to_steps", "open_tokens"]
