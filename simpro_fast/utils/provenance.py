"""Which code is this: commit of the clone, digest of the source files, versions of libraries."""

from __future__ import annotations

import platform
import subprocess
from functools import cache
from hashlib import sha256
from importlib import metadata
from pathlib import Path

import simpro_kernels
import torch


def source_digest() -> str:
    """sha256 over the names and bytes of all source files of simpro_fast and simpro_kernels."""
    digest = sha256()
    kernels = Path(str(simpro_kernels.__file__)).parent
    for name, root in (("simpro_fast", Path(__file__).parents[1]), ("simpro_kernels", kernels)):
        for path in sorted(root.rglob("*.py")):
            digest.update(f"{name}/{path.relative_to(root)}\0".encode())
            digest.update(sha256(path.read_bytes()).digest())
    return digest.hexdigest()


@cache
def git_commit() -> str | None:
    """Commit of the source tree, with `+` when it has uncommitted changes; None outside a clone.

    Asked once: the tree may change while a process runs. Results of benches are no source.
    """
    root = Path(__file__).resolve().parents[2]

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=20
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # A wheel inside somebody else's repository must not claim their commit.
    if git("ls-files", "--error-unmatch", str(Path(__file__).resolve())) is None:
        return None
    commit = git("rev-parse", "--short=12", "HEAD")
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!bench/results")
    return f"{commit}{'+' if changed else ''}" if commit else None


# Versions of these change what a rank computes or how it talks to the others.
PACKAGES = {
    "numpy": ("numpy",),
    "DALI": ("nvidia-dali-cuda130", "nvidia-dali-cuda120"),
    "nvImageCodec": ("nvidia-nvimgcodec-cu13", "nvidia-nvimgcodec-cu12"),  # decodes for DALI
    "DeepSpeed": ("deepspeed",),
    "Triton": ("triton",),
}


def version_of(*names: str) -> str | None:
    """Version of the first of these packages that is installed."""
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def library_versions() -> dict[str, str]:
    """Python, torch (with its build) and the packages that a rank computes with."""
    nccl = torch.cuda.nccl.version() if torch.cuda.is_available() else None
    return {
        "Python": platform.python_version(),
        "torch": torch.__version__,
        **{name: version_of(*names) or "missing" for name, names in PACKAGES.items()},
        "NCCL": ".".join(map(str, nccl)) if nccl else "not used",
    }
