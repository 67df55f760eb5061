"""Image files: which are read, how, and what is wrong with the others.

One rule for every path through the system: 8-bit RGB; grey, palette, CMYK are converted, alpha is
dropped, colour profiles are not applied, the orientation tag of a JPEG is obeyed. What DALI and
Pillow would read differently is refused by name: more than 8 bits a channel, animations, and an
orientation tag in anything but a JPEG.
"""

from __future__ import annotations

import hashlib
import io
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from PIL import Image, ImageOps

from simpro_fast.data.files.tar_index import Member
from simpro_fast.errors import UserError

ImageSource = Path | Member
"""A file, or a part of one: where the encoded bytes of an image come from."""

_READ = ("jpg", "jpeg", "jpe", "jfif", "png", "bmp", "webp")
_REFUSED = ("gif", "tif", "tiff", "ppm", "pgm", "pnm", "avif", "heic", "heif", "jp2", "ico", "tga")
EXTENSIONS = frozenset([*_READ, *_REFUSED])
"""Files with these endings, in any case, are taken for images; others are ignored and counted."""
FORMATS = ("JPEG", "MPO", "PNG", "BMP", "WEBP")
"""What is read, in Pillow's names. MPO is the JPEG of phones with a second picture in it."""
OK = "ok"
UNREADABLE = "unreadable"
_JPEG = ("JPEG", "MPO")
_MODES = ("RGB", "RGBA", "RGBX", "L", "LA", "P", "PA", "1", "CMYK")
_ORIENTATION = 0x0112
_TURNED = (5, 6, 7, 8)  # orientations that exchange width and height

# Pillow's remarks on large pictures and odd tags, one per file. Once and for all: files are looked
# at in threads, where setting filters for a while is not safe.
warnings.filterwarnings("ignore", module=r"PIL(\.|$)")


@dataclass(frozen=True)
class Facts:
    """What a look at one file gave."""

    width: int = 0
    """Pixels, after the orientation tag; 0 where unknown."""
    height: int = 0
    bytes: int = 0
    sha256: str = ""
    """Of the file's bytes; empty when only the header was read."""
    status: str = OK
    """`ok`, `damaged: <reason>`, `unsupported: <what>` or `unreadable: <reason>`."""


def is_image_name(name: str) -> bool:
    """Whether a file is taken for an image, by its ending."""
    return name.rpartition(".")[2].lower() in EXTENSIONS


def read_header(image: ImageSource) -> Facts:
    """Size and format without decoding, hence without noticing damage in the pixels."""
    try:
        with image.open("rb") as file:
            return _look(file, _length(file), "", decode=False)
    except OSError as error:
        return Facts(status=f"{UNREADABLE}: {error.strerror or error}")


def check_file(image: ImageSource) -> Facts:
    """Read the whole file, decode it, hash it."""
    try:
        content = image.read_bytes()
    except OSError as error:
        return Facts(status=f"{UNREADABLE}: {error.strerror or error}")
    digest = hashlib.sha256(content).hexdigest()
    return _look(io.BytesIO(content), len(content), digest, decode=True)


def read_rgb(source: ImageSource) -> Image.Image:
    """The upright picture in RGB.

    Raises:
        UserError: the file is gone, damaged or of a kind that is not read; names it.
    """
    try:
        with source.open("rb") as file:
            facts = _look(file, _length(file), "", decode=False)
            if facts.status != OK:
                raise UserError(f"{source}: {facts.status}")
            file.seek(0)
            with Image.open(file) as image:
                return ImageOps.exif_transpose(image).convert("RGB")
    except UserError:
        raise
    except Exception as error:
        gone = isinstance(error, OSError) and error.strerror
        reason = f"{UNREADABLE}: {gone}" if gone else f"damaged: {_one_line(error)}"
        raise UserError(f"{source}: {reason}") from None


def _length(file: IO[bytes]) -> int:
    length = file.seek(0, os.SEEK_END)
    file.seek(0)
    return length


def _look(file: IO[bytes], size: int, digest: str, *, decode: bool) -> Facts:
    if size == 0:
        return Facts(sha256=digest, status="damaged: empty file")
    width = height = 0
    try:
        with Image.open(file) as image:
            width, height = image.size
            status = _unsupported(image, file)
            if status == OK and _orientation(image) in _TURNED:
                width, height = height, width
            if status == OK and decode:
                image.load()
    except Image.UnidentifiedImageError:
        status = "damaged: not an image, whatever its name says"
    except Exception as error:  # decoders raise nearly anything on damaged input
        status = f"damaged: {_one_line(error)}"
    return Facts(width, height, size, digest, status)


def _unsupported(image: Image.Image, file: IO[bytes]) -> str:
    kind = image.format or "unknown format"
    if kind not in FORMATS:
        return f"unsupported: {kind}; convert it to PNG or JPEG"
    if kind not in _JPEG and getattr(image, "is_animated", False):
        return f"unsupported: animated {kind}; extract its frames"
    if image.mode not in _MODES or (kind == "PNG" and _png_bits(file) > 8):
        deep = "16-bit " if kind == "PNG" else f"{image.mode} "
        return f"unsupported: {deep}{kind}; convert it to 8 bits a channel"
    if kind not in _JPEG and _orientation(image) not in (0, 1):
        return f"unsupported: {kind} with an orientation tag; save it upright"
    return OK


def _png_bits(file: IO[bytes]) -> int:
    """Bits a channel from the header: Pillow hides them where it converts on its own."""
    position = file.tell()
    file.seek(24)
    bits = file.read(1)
    file.seek(position)
    return bits[0] if bits else 0


def _orientation(image: Image.Image) -> int:
    try:
        value = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # a broken tag block; decoders ignore it as well
        return 1
    return value if isinstance(value, int) else 1


def _one_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__
