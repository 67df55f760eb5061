"""Image files: which are read, how, and what is wrong with the others.

One rule for every path through the system: 8-bit RGB; grey, palette, CMYK are converted, alpha is
dropped, colour profiles are not applied, the orientation tag in the EXIF block of a JPEG is obeyed
and no other (XMP's is not). What DALI and Pillow would read differently is refused by name: more
than 8 bits a channel, animations, an orientation tag in anything but a JPEG or of an odd form.

HEIC, the format of iPhones, DALI cannot decode at all. Pillow does with pillow-heif (the extra
`heif`), so packing reads it, and training from files refuses it. Which files are HEIC must be
known without opening them: by their names.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import IO

import numpy as np
from PIL import Image, ImageChops, ImageFile

from simpro_fast.data.files.tar_index import Member
from simpro_fast.utils.errors import UserError, pip_line
from simpro_fast.utils.local_files import is_transient, patiently
from simpro_fast.utils.regular_file import open_regular, read_regular

ImageSource = Path | Member
"""A file, or a part of one: where the encoded bytes of an image come from."""
Decoder = Callable[[bytes, int, int], np.ndarray | None]
"""Encoded bytes and the width and height that they should have, to uint8 [H, W, 3]; None where
they are refused."""

_READ = ("jpg", "jpeg", "jpe", "jfif", "png", "bmp", "webp")
_REFUSED = ("gif", "tif", "tiff", "ppm", "pgm", "pnm", "avif", "heic", "heif", "jp2", "ico", "tga")
EXTENSIONS = frozenset([*_READ, *_REFUSED])
"""Files with these endings, in any case, are taken for images; others are ignored and counted."""
FORMATS = ("JPEG", "MPO", "PNG", "BMP", "WEBP")
"""Formats that are read, in Pillow's names. MPO is the JPEG of phones with a second picture."""
_HEIF_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")
_HEIF_NAMES = (".heic", ".heif")
_ONLY_PACKED = (
    "unsupported: HEIC, which the decoder of training cannot read; convert it to JPEG, or train "
    "from the array of prepare --pack PX, which reads files named .heic"
)
OK = "ok"
UNREADABLE = "unreadable"
CHANGED = "changed"
UNSUPPORTED = "unsupported"
REFUSED = "damaged: the decoder of training refuses it; save it anew"
TOO_LARGE = "unsupported: more than"
MEGAPIXELS = 179
"""The largest pictures that are read where nothing else is said, in millions of pixels."""
_MOST_BYTES = 1 << 30
_JPEG = ("JPEG", "MPO")
_MODES = ("RGB", "RGBA", "RGBX", "L", "LA", "P", "PA", "1", "CMYK")
_EXIF = b"Exif\0\0"
_ORIENTATION, _SHORT = 0x0112, 3
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""Transposition that turns a picture of this orientation upright."""
_ON_THE_SIDE = tuple(_UPRIGHT[k] for k in (5, 6, 7, 8))
_NEAR = 16
"""Two decoders of a lossy file may differ by some units in a pixel; by more, it is another
picture."""


class UnreadableImage(UserError):
    """A file that is gone, damaged, of a kind that is not read or of another size than listed."""

    def __init__(self, source: ImageSource, status: str) -> None:
        super().__init__(f"{source}: {status}")
        self.status = status
        """Status as in `Facts`."""


@dataclass(frozen=True)
class Facts:
    """Result of a look at one file."""

    width: int = 0
    """Pixels, after the orientation tag; 0 where unknown."""
    height: int = 0
    bytes: int = 0
    sha256: str = ""
    """Digest of the file's bytes; empty when only the header was read."""
    status: str = OK
    """`ok`, or `damaged`, `unsupported`, `unreadable`, `changed`, with a reason after a colon."""


def is_image_name(name: str) -> bool:
    """Whether a file is taken for an image, by its ending."""
    return name.rpartition(".")[2].lower() in EXTENSIONS


def is_heif_name(name: str) -> bool:
    """Whether a file is taken for HEIC, which only packing reads, by its ending."""
    return name.lower().endswith(_HEIF_NAMES)


def read_header(image: ImageSource, megapixels: float = MEGAPIXELS) -> Facts:
    """Size and format without decoding, hence without noticing damage in the pixels."""

    def look() -> Facts:
        with _open(image) as file:
            return _look(file, megapixels, pixels=False)[0]

    try:
        return patiently(look)
    except OSError as error:
        return Facts(status=f"{UNREADABLE}: {error.strerror or error}")


def check_file(
    image: ImageSource,
    decoder: Decoder | None = None,
    megapixels: float = MEGAPIXELS,
    packing: bool = False,
) -> Facts:
    """Read the whole file, decode it, hash it.

    Args:
        decoder: another decoder, of which the same picture is asked as of Pillow, but for HEIC.
        megapixels: the largest picture that is decoded.
        packing: HEIC is read.
    """
    heif = packing and is_heif_name(str(image))

    def look() -> tuple[Facts, bytes]:
        with _open(image) as file:
            facts, _ = _look(file, megapixels, pixels=False, heif=heif)
            if facts.status != OK:
                return facts, b""  # whatever it is, it need not fit into memory
            file.seek(0)
            return facts, file.read()

    try:
        facts, content = patiently(look)
    except OSError as error:
        return Facts(status=f"{UNREADABLE}: {error.strerror or error}")
    if facts.status != OK:
        return facts
    facts, picture = _look(io.BytesIO(content), megapixels, pixels=True, heif=heif)
    if picture is not None and decoder is not None and not _is_heif(content[:12]):
        status = _compared(picture, decoder(content, *picture.size))
        facts = replace(facts, status=status)
    return replace(facts, sha256=hashlib.sha256(content).hexdigest())


def read_rgb(source: ImageSource, listed: tuple[int, int] | None = None) -> Image.Image:
    """The upright picture in RGB.

    Args:
        listed: the width and height that it must have.

    Raises:
        UnreadableImage: names the file and says why.
    """
    limit = MEGAPIXELS if listed is None else math.inf  # the list is the limit
    heif = is_heif_name(str(source))

    def look() -> tuple[str, Image.Image | None]:
        with _open(source) as file:
            facts, _ = _look(file, limit, pixels=False, heif=heif)
            status = facts.status if listed is None else size_status(facts, listed)
            if status != OK:
                return status, None
            file.seek(0)
            facts, picture = _look(file, limit, pixels=True, heif=heif)
            return facts.status, picture

    try:
        status, picture = patiently(look)
    except OSError as error:
        status, picture = f"{UNREADABLE}: {error.strerror or error}", None
    if picture is None:
        raise UnreadableImage(source, status)
    return picture


def size_status(facts: Facts, listed: tuple[int, int]) -> str:
    """The status of a file that must have the listed width and height."""
    if facts.status != OK or (facts.width, facts.height) == listed:
        return facts.status
    width, height = listed
    return f"{CHANGED}: {facts.width} x {facts.height} pixels, {width} x {height} listed"


def encoded_bytes(source: ImageSource) -> bytes | memoryview:
    """The content of a file. Raises `OSError`."""
    if isinstance(source, Member):
        return source.read_view()
    return patiently(lambda: read_regular(source))


def _open(source: ImageSource) -> IO[bytes]:
    return source.open() if isinstance(source, Member) else open_regular(source)


def _look(
    file: IO[bytes], megapixels: float, *, pixels: bool, heif: bool = False
) -> tuple[Facts, Image.Image | None]:
    """Look at a file (without a hash), and with `pixels` at its upright picture in RGB if it is ok.

    Args:
        heif: whether HEIC is read.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    if size == 0:
        return Facts(status="damaged: empty file"), None
    if _is_heif(file.read(12)):
        status = _no_heif() if heif else _ONLY_PACKED
        if status != OK:
            return Facts(0, 0, size, status=status), None
    file.seek(0)
    width = height = 0
    picture = None
    try:
        with _opened(file) as image:
            width, height = image.size
            turn = None
            status = _unsupported(image, file, size, megapixels)
            if status == OK and image.format in _JPEG:
                turn = _UPRIGHT.get(_orientation(image))
                if turn in _ON_THE_SIDE:
                    width, height = height, width
            if status == OK and pixels:
                image.load()
                image.info.pop("transparency", None)  # alpha is dropped; Pillow warns that it is
                picture = (image if turn is None else image.transpose(turn)).convert("RGB")
    except Image.UnidentifiedImageError:
        status = "damaged: not an image, whatever its name says"
    except Image.DecompressionBombError:  # some readers ask Pillow's limit themselves
        status = f"{TOO_LARGE} Pillow's own limit for this format; scale it down"
    except Exception as error:  # decoders raise nearly anything on damaged input
        if is_transient(error):
            raise
        status = f"damaged: {_one_line(error)}"
        if "MAX_TEXT" in status:
            status = "unsupported: PNG with a text that swells to more than 1 MiB; save it without"
    return Facts(width, height, size, status=status), picture


def _opened(file: IO[bytes]) -> ImageFile.ImageFile:
    """`Image.open`, but for its limit: that belongs to the whole process, ours to one file.

    Raises:
        Image.UnidentifiedImageError: no reader of Pillow's takes the file.
    """
    file.seek(0)
    start, tried = file.read(16), set[str]()
    for load_readers in (Image.preinit, Image.init):  # the common ones, then all
        load_readers()
        for kind in [kind for kind in Image.ID if kind not in tried]:
            tried.add(kind)
            factory, accepts = Image.OPEN[kind]
            accepted = accepts is None or accepts(start)
            if accepted and not isinstance(accepted, str):  # a string says what is not installed
                file.seek(0)
                with suppress(SyntaxError, IndexError, TypeError, struct.error):
                    return factory(file, "")
    raise Image.UnidentifiedImageError


def _is_heif(start: bytes) -> bool:
    """Whether a file of these first 12 bytes is HEIC, whatever its name says."""
    return start[4:8] == b"ftyp" and start[8:12] in _HEIF_BRANDS


@cache
def _no_heif() -> str:
    """The status of HEIC files where Pillow cannot read them; `ok` where it can, from now on."""
    try:
        import pillow_heif
    except ImportError:
        return f"unsupported: HEIC needs pillow-heif: {pip_line('heif')}; or convert it to JPEG"
    pillow_heif.register_heif_opener(thumbnails=False)
    return OK


def _unsupported(image: Image.Image, file: IO[bytes], size: int, megapixels: float) -> str:
    kind = image.format or "unknown format"
    heif = kind == "HEIF"
    if heif and image.info.get("bit_depth", 8) > 8:
        return f"unsupported: {image.info['bit_depth']}-bit HEIC; convert it to 8 bits a channel"
    if kind not in FORMATS and not heif:
        return f"unsupported: {kind}; convert it to PNG or JPEG"
    width, height = image.size
    if width * height > megapixels * 10**6:
        return (
            f"{TOO_LARGE} {megapixels} million pixels ({width} x {height}); scale it down or raise "
            "data.max_megapixels (prepare: --max-megapixels)"
        )
    if size > _MOST_BYTES:
        return f"unsupported: file of {size / 2**30:.1f} GiB; save it anew"
    if kind not in _JPEG and getattr(image, "is_animated", False):
        return f"unsupported: animated {kind}; extract its frames"
    if image.mode not in _MODES or (kind == "PNG" and _png_bits(file) > 8):
        deep = "16-bit " if kind == "PNG" else f"{image.mode} "
        return f"unsupported: {deep}{kind}; convert it to 8 bits a channel"
    if heif:  # turned by its container, which libheif obeys; EXIF's tag in it means nothing
        return OK
    try:
        turned = _orientation(image) != 1
    except ValueError as error:
        return f"unsupported: {kind} with {error}; save it upright"
    if turned and kind not in _JPEG:
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
    """The orientation tag of the EXIF block, 1 (upright) to 8; 1 where there is none.

    Pillow's own takes XMP's where EXIF has none, and decodes a PNG to look for one.

    Raises:
        ValueError: it is written in a form that decoders read differently.
    """
    blocks = [data for name, data in getattr(image, "applist", ()) if data.startswith(_EXIF)]
    if len(blocks) > 1:
        raise ValueError("several EXIF blocks")
    tags = image.info.get("exif", b"").removeprefix(_EXIF)
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(tags[:4])
    if order is None:
        return 1
    try:
        (table,) = struct.unpack_from(f"{order}I", tags, 4)
        (count,) = struct.unpack_from(f"{order}H", tags, table)
        for place in range(table + 2, table + 2 + 12 * count, 12):
            tag, kind, _, value = struct.unpack_from(f"{order}HHIH", tags, place)
            if tag == _ORIENTATION:
                if kind != _SHORT:
                    raise ValueError(f"an orientation tag of type {kind} instead of {_SHORT}")
                return value if value in _UPRIGHT else 1
    except struct.error:  # a table that is cut short
        pass
    return 1


def _compared(picture: Image.Image, other: np.ndarray | None) -> str:
    """The status of a picture that another decoder has decoded as well."""
    if other is None:
        return REFUSED
    if other.shape[:2] == (picture.height, picture.width):
        difference = ImageChops.difference(picture, Image.fromarray(other))
        if np.asarray(difference).max() <= _NEAR:
            return OK
    return "unsupported: decoders see different pictures in it; save it anew, upright"


def _one_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__
