"""Record of what a scan left out, and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

HIDDEN = "hidden"
NO_IMAGE = "not an image by its ending"
SPECIAL = "pipe, socket or device by an image's name"
OUTSIDE = "image beside the class folders"
SHARD_OUTSIDE = "tar beside or inside class folders; give it a folder of its own"
TAKEN = "unlabeled that is also in the labeled or val folder"
LONELY = "sample of a tar without an image"
FURTHER = "further image of a sample of a tar"


@dataclass
class Ignored:
    """Reasons with the number of names and the first of each for the message."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """Notes on what was taken all the same, and should be known."""

    def add(self, reason: str, path: str) -> None:
        self.counts[reason] += 1
        self.examples.setdefault(reason, path)

    def lines(self) -> list[str]:
        return [
            f"{count} {reason} (first: {self.examples[reason]})"
            for reason, count in sorted(self.counts.items())
        ]
