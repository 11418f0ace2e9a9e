# SPDX-License-Identifier: Apache-2.0
"""Which bytes a model of text reads: the documents of a corpus, and the rows of tokens that are packed from them.

A token is a byte. Byte 0 begins a document, because no text holds it. A row is a piece of one long stream of documents,
so it begins and ends within documents.
"""

import dataclasses
import functools
import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

BEGIN = 0
VOCABULARY = 256
HELD_OUT = 16
"""Every 16th document is kept for evaluation, or the last 16th of the last one where there are fewer."""
Row = dict[str, np.ndarray]
"""Arrays `[T]` of int32 in natural order: tokens; labels, the token after each, or -1 after the last of a document;
segments, the document of each token in its row; positions, from the start of the document or of the row."""


class CorpusError(SystemExit):
    """The corpus is empty, binary or too small for a batch. Uncaught, it prints its message and exits with status 1."""


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """The documents for training and those for evaluation, each an array of uint8 that begins with `BEGIN`."""

    training: list[np.ndarray]
    held_out: list[np.ndarray]
    seed: int = 0

    @functools.cached_property
    def size(self) -> int:
        """The tokens for training."""
        return sum(map(len, self.training))

    @functools.cached_property
    def fingerprint(self) -> int:
        """A number that another corpus or another seed changes."""
        found = hashlib.sha256(str(self.seed).encode())
        for document in (*self.training, *self.held_out):
            found.update(document.tobytes())
        return int(found.hexdigest()[:7], 16)

    @functools.lru_cache(maxsize=2)  # noqa: B019 - a program has one or two corpora
    def stream(self, epoch: int) -> np.ndarray:
        """All documents for training one after the other, in an order of this epoch."""
        order = np.random.default_rng((self.seed, epoch)).permutation(len(self.training))
        return np.concatenate([self.training[number] for number in order])

    def row(self, number: int, length: int, joined: bool) -> Row:
        """Row `number` of a run: a function of its number, so that a resumed run reads the same rows.

        With `joined`, positions count from the start of the row: documents of a row then see each other.
        """
        in_epoch = (self.size - 1) // length
        start = number % in_epoch * length
        piece = self.stream(number // in_epoch)[start : start + length + 1].astype(np.int32)
        tokens, labels = piece[:-1], np.where(piece[1:] == BEGIN, -1, piece[1:])
        places, begins = np.arange(length, dtype=np.int32), tokens == BEGIN
        positions = places if joined else places - np.maximum.accumulate(np.where(begins, places, 0))
        return {
            "tokens": tokens,
            "labels": labels,
            "segments": np.cumsum(begins, dtype=np.int32),
            "positions": positions,
        }

    def evaluation(self, length: int, count: int) -> list[Row]:
        """`count` rows with the start of one held-out document each; a row is empty after the end of its document.

        Only documents that fill a row are taken, if there are any, so that all positions are those of the same text.
        """
        filling = [document for document in self.held_out if len(document) > length]
        documents = (filling or sorted(self.held_out, key=len, reverse=True))[:count]
        places, rows = np.arange(length, dtype=np.int32), []
        for number in range(count):
            document = documents[number].astype(np.int32) if number < len(documents) else places[:0]
            piece = np.pad(document[: length + 1], (0, max(0, length + 1 - len(document))))
            labels = np.where(places + 1 < len(document), piece[1:], -1)
            rows.append({"tokens": piece[:-1], "labels": labels, "segments": 0 * places, "positions": places})
        return rows


def read(folder: Path | None, needed: int, seed: int = 0) -> Corpus:
    """The corpus in a folder or file, or in Python's standard library; `needed` is the number of tokens of a batch."""
    if folder is None:
        place, paths = "Python's standard library", standard_library()
    elif folder.is_dir():
        place, paths = str(folder), (path for path in folder.rglob("*") if path.is_file())
    elif folder.is_file():
        place, paths = str(folder), iter([folder])
    else:
        raise CorpusError(f"There is no folder or file {folder}: --data names one that holds text.")
    files = [path.read_bytes() for path in sorted(paths)]
    texts = [text for text in files if text.strip() and is_text(text)]
    if not any(file.strip() for file in files):
        raise CorpusError(f"The corpus {place} is empty: it has {len(files)} files, and no byte of text in them.")
    if not texts:
        raise CorpusError(f"The corpus {place} is binary: none of its {len(files)} files is text in UTF-8.")
    documents = [np.frombuffer(bytes([BEGIN]) + text, np.uint8) for text in texts]
    if len(documents) < HELD_OUT:
        cut = len(documents[-1]) - len(documents[-1]) // HELD_OUT
        training, held_out = [*documents[:-1], documents[-1][:cut]], [documents[-1][cut:]]
    else:
        training, held_out = [x for n, x in enumerate(documents) if n % HELD_OUT], documents[::HELD_OUT]
    found = Corpus(training, held_out, seed)
    if found.size <= needed:
        raise CorpusError(
            f"The corpus {place} has {found.size:,} bytes of text for training, and a batch takes {needed:,}: "
            "add text, or take a smaller --rows or --length."
        )
    return found


def standard_library() -> Iterator[Path]:
    """The modules of Python's standard library, with their documentation strings."""
    root = Path(sysconfig.get_path("stdlib"))
    return (path for path in root.rglob("*.py") if not {"site-packages", "dist-packages"} & {*path.parts})


def is_text(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return BEGIN not in content
