"""Several hundred broken images: cut off, with flipped bits, wrong headers, or more than they say. Made here, each run.

`decode_image` gives a picture or a MediaError for each of them, and memory stays where it was.
"""

from __future__ import annotations

import io
import random
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from PIL import Image

from server.media import MediaError, decode_image

ROOT = Path(__file__).resolve().parents[2]
MAX_PIXELS = 4_000_000
# What may stay allocated after hundreds of failures: arenas of the allocator, not pictures.
MAX_GROWTH = 64 << 20


def encode(image: Image.Image, form: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def sound_images() -> dict[str, bytes]:
    """Small files of every format and several of their kinds."""
    noise = Image.effect_noise((48, 40), 80)
    colour = Image.merge("RGB", [noise, noise.transpose(Image.Transpose.ROTATE_180), noise])
    clear = colour.convert("RGBA")
    clear.putalpha(noise)
    frames = [colour.quantize(16), noise.convert("P")]
    return {
        "png-rgb": encode(colour, "PNG"),
        "png-alpha": encode(clear, "PNG"),
        "png-palette": encode(colour.quantize(16), "PNG", transparency=3),
        "png-grey16": encode(noise.convert("I;16"), "PNG"),
        "jpeg": encode(colour, "JPEG", exif=_orientation(6)),
        "jpeg-progressive": encode(colour, "JPEG", progressive=True),
        "jpeg-cmyk": encode(colour.convert("CMYK"), "JPEG"),
        "webp": encode(colour, "WEBP"),
        "webp-lossless": encode(clear, "WEBP", lossless=True),
        "webp-animated": encode(colour, "WEBP", save_all=True, append_images=[clear.convert("RGB")]),
        "gif": encode(frames[0], "GIF", save_all=True, append_images=frames[1:]),
        "bmp": encode(colour, "BMP"),
        "tiff": encode(colour, "TIFF"),
        "tiff-lzw": encode(colour, "TIFF", compression="tiff_lzw"),
        "tiff-deflate": encode(clear, "TIFF", compression="tiff_adobe_deflate"),
    }


def _orientation(value: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = value
    return exif


def cut_off(data: bytes) -> Iterator[bytes]:
    yield from (data[: len(data) * part // 12] for part in range(1, 12))
    yield from (data[:length] for length in (3, 4, 8, 13, 24, 29, 33))


def flipped(data: bytes, chance: random.Random) -> Iterator[bytes]:
    """Single bits anywhere, and several in the header, where sizes and offsets are."""
    for _ in range(12):
        yield _flip(data, [chance.randrange(8 * len(data))])
    for _ in range(12):
        yield _flip(data, [chance.randrange(8 * min(len(data), 96)) for _ in range(4)])


def _flip(data: bytes, bits: list[int]) -> bytes:
    changed = bytearray(data)
    for bit in bits:
        changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def wrong_headers(images: dict[str, bytes]) -> Iterator[bytes]:
    """Each format's beginning with another one's body, with nothing, and with noise after it."""
    chance = random.Random(3)
    for data in images.values():
        for other in images.values():
            if other[:2] != data[:2]:
                yield data[:16] + other[16:]
        yield data[:64] + bytes(4096)
        yield data[:32] + chance.randbytes(512)
        yield bytes(len(data))
        yield data[len(data) // 2 :] + data[: len(data) // 2]


def bombs() -> Iterator[bytes]:
    """Small files that would be huge pictures, or that would unpack for ever."""
    for side in (30_000, 2**16 - 1, 2**31 - 1):
        yield _png(side, side, zlib.compress(bytes(1 << 20), 9))
        yield b"GIF89a" + struct.pack("<HHBBB", side & 0xFFFF, side & 0xFFFF, 0, 0, 0) + b"," + bytes(9) + b"\x02\x00;"
        yield b"BM" + struct.pack("<IHHIIiiHHIIiiII", 54, 0, 0, 54, 40, side, side, 1, 24, 0, 0, 0, 0, 0, 0)
    yield _png(1000, 1000, zlib.compress(bytes(64 << 20), 1))  # more rows than the header says
    yield encode(Image.new("1", (3000, 3000)), "TIFF", compression="group4")
    yield encode(Image.new("L", (2001, 2001)), "WEBP", lossless=True, method=0)
    yield _png_with_text(zlib.compress(bytes(64 << 20), 1))
    # A directory that is its own successor, and one with more entries than the file.
    yield b"II*\x00" + struct.pack("<IHHHII", 8, 1, 256, 3, 1, 8) + struct.pack("<I", 8)
    yield b"MM\x00*" + struct.pack(">IH", 8, 65535) + b"\x01\x00\x00\x04\xff\xff\xff\xff\x00\x00\x00\x08" * 2000


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def _png(width: int, height: int, rows: bytes) -> bytes:
    header = _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + _chunk(b"IDAT", rows) + _chunk(b"IEND", b"")


def _png_with_text(packed: bytes) -> bytes:
    sound = _png(8, 8, zlib.compress(bytes(72)))
    return sound[:33] + _chunk(b"zTXt", b"a\x00\x00" + packed) + _chunk(b"iCCP", b"a\x00\x00" + packed) + sound[33:]


def corpus() -> list[bytes]:
    images = sound_images()
    chance = random.Random(7)
    broken = [piece for data in images.values() for piece in (*cut_off(data), *flipped(data, chance))]
    return [*broken, *wrong_headers(images)]


def decode(data: bytes) -> str:
    """How it ended."""
    try:
        picture = decode_image(data, max_pixels=MAX_PIXELS)
    except MediaError as error:
        assert str(error)
        return "refused"
    assert picture.mode == "RGB" and 0 < picture.width * picture.height <= MAX_PIXELS
    return "shown"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(120)
def test_broken_images_and_memory() -> None:
    files = corpus()
    assert len(files) > 800
    for data in sound_images().values():
        assert decode(data) == "shown"
    first = [decode(data) for data in files]  # warms up what allocates once
    process = psutil.Process()
    before = process.memory_info().rss
    again = [decode(data) for data in files]
    assert process.memory_info().rss - before < MAX_GROWTH
    assert first == again
    assert first.count("refused") > len(files) // 2  # what has a flipped bit in its pixels is a picture still


@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(120)
def test_bombs_do_not_go_off() -> None:
    files = list(bombs())
    process = psutil.Process()
    before = process.memory_info().rss
    outcomes = [decode(data) for data in files]
    assert process.memory_info().rss - before < MAX_GROWTH
    assert outcomes.count("refused") >= len(files) - 2  # too many rows, or text that is not looked at, harm nobody


def test_pillows_warnings_are_neither_printed_nor_kept() -> None:
    """Python keeps each distinct text of a warning for ever, and hostile files make Pillow say ever new ones."""
    code = (
        "import PIL.TiffImagePlugin as plugin; from server.media import decode_image, MediaError; import sys\n"
        "for data in sys.stdin.buffer.read().split(b'--'):\n"
        "    try: decode_image(data)\n"
        "    except MediaError: pass\n"
        "print(sorted(getattr(plugin, '__warningregistry__', {}).keys() - {'version'}))"
    )
    files = [_tiff_with_a_long_tag(count) for count in range(2, 40)]
    done = subprocess.run([sys.executable, "-c", code], input=b"--".join(files), capture_output=True, cwd=ROOT)
    assert (done.stdout.strip(), done.stderr) == (b"[]", b"")


def _tiff_with_a_long_tag(entries: int) -> bytes:
    """A picture's width, so many times."""
    tags = [(256, 3, entries, 100), (257, 3, 1, 8)]
    return b"II*\x00" + struct.pack("<IH", 8, 2) + b"".join(struct.pack("<HHII", *tag) for tag in tags) + bytes(300)
