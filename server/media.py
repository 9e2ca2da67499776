"""Bytes of an image, wherever they come from, become one upright RGB picture.

What a viewer would show is what the model gets, which is more than the reference does (it converts and nothing else):

* EXIF orientation is applied.
* Transparency is composited on white, however the format expresses it.
* 16-bit grey is scaled to 8 bits, not clipped. 32-bit integer grey is taken when its values fit 16 bits. Other
  integers and floating point are refused: nothing in them says which value is white.
* Of an animation, the first frame is taken. Where that frame leaves the canvas uncovered, it is white.
* Colour profiles are ignored, as in the reference; CMYK is converted plainly.

Sizes are checked in the header, before any pixel memory is taken. The content alone decides the format; a MIME type or
a file name is only a hint and is not looked at.
"""

import base64
import binascii
import contextlib
import re
import struct
import warnings
from collections.abc import Callable
from io import BytesIO
from urllib.parse import unquote_to_bytes

import numpy as np
from PIL import ExifTags, Image, ImageFile
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile

# On odd files Pillow warns, and Python keeps each distinct text for ever: hostile files would fill memory and the log.
warnings.filterwarnings("ignore", module=r"PIL\.")

SUPPORTED_FORMATS = "PNG, JPEG, WebP, GIF, BMP and TIFF"
DEFAULT_MAX_PIXELS = 64_000_000

_READERS: dict[str, Callable[[BytesIO], ImageFile.ImageFile]] = {
    "PNG": PngImageFile,
    "JPEG": JpegImageFile,
    "WebP": WebPImageFile,
    "GIF": GifImageFile,
    "BMP": BmpImageFile,
    "TIFF": TiffImageFile,
}
_SIGNATURES = (
    ("PNG", re.compile(rb"\x89PNG\r\n\x1a\n")),
    ("JPEG", re.compile(rb"\xff\xd8\xff")),
    ("WebP", re.compile(rb"RIFF....WEBP", re.DOTALL)),
    ("GIF", re.compile(rb"GIF8[79]a")),
    ("BMP", re.compile(rb"BM")),
    ("TIFF", re.compile(rb"MM\x00[*+]|II[*+]\x00")),
)
_TRANSPOSITIONS = {  # EXIF orientation -> what makes the picture upright
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_GREY_16_MODES = ("I;16", "I;16L", "I;16B", "I;16N")
_TIFF_BITS_PER_SAMPLE = 258
_TIFF_PHOTOMETRIC = 262
_TIFF_WHITE_IS_ZERO = 0

_SCHEME = re.compile(r"([a-z][a-z0-9+.\-]*):", re.IGNORECASE)
_WHITE_SPACE = re.compile(r"\s+")
_PERCENT_ENCODED = {f"%{ord(character):02X}": character for character in "+/=-_\t\n\r "}  # what base64 text may hold
_MAX_UNENCODED = 1_000_000  # characters of a data URL without base64: undoing %XX takes many times their memory
_FOREIGN_TO_BASE64 = re.compile(r"[^A-Za-z0-9+/]")


class MediaError(ValueError):
    """The image cannot be used. The message names the cause and is meant for whoever sent it."""


def file_in_url(url: str, *, max_bytes: int) -> bytes:
    """The image file in an image URL: a data URL of any form, or bare base64 without ``data:``.

    Nothing is fetched and no file is opened; `server/fetch.py` does that for URLs of other forms.

    Raises:
        MediaError: the URL is malformed (naming the part), not a data URL, or larger than ``max_bytes`` when decoded.
    """
    url = url.strip()
    scheme = _SCHEME.match(url)
    if scheme is None:
        data = _bare_base64(url, max_bytes)
    elif scheme[1].lower() == "data":
        data = _data_url_bytes(url[scheme.end() :], max_bytes)
    else:
        raise MediaError(
            f"image URLs of the scheme {scheme[1][:32]!r} are not accepted; send a data, http or https URL"
        )
    if len(data) > max_bytes:
        raise MediaError(f"the image has {len(data)} bytes, more than the limit of {max_bytes}")
    return data


def decode_image(data: bytes, *, max_pixels: int = DEFAULT_MAX_PIXELS) -> Image.Image:
    """Decodes one image file into an upright RGB picture.

    Raises:
        MediaError: unknown format, more than ``max_pixels`` pixels, no pixels, cut off before the last pixel, damaged,
            or pixels of a kind that has no agreed colours.
    """
    if not data:
        raise MediaError("the image is empty")
    format = next((name for name, signature in _SIGNATURES if signature.match(data)), None)
    if format is None:
        raise MediaError(f"the image format is not supported; {SUPPORTED_FORMATS} are")
    try:
        return _decode(data, format, max_pixels)
    except MediaError:
        raise
    except Image.DecompressionBombError as error:  # a GIF's first frame may be larger than its screen
        raise MediaError(f"a frame of the {format} file has more pixels than can be decoded") from error
    except Exception as error:
        # The one place that catches everything: on hostile bytes Pillow raises, besides its own errors, OSError,
        # SyntaxError, ValueError, TypeError, KeyError, IndexError, EOFError, struct.error, OverflowError,
        # AttributeError, ZeroDivisionError, zlib.error, MemoryError and whatever the next release thinks of. All mean
        # that these bytes are no image, and none may take down the request of somebody else.
        if _is_incomplete(data, format) or "truncated" in str(error).lower():
            raise MediaError(f"image data is incomplete: the {format} file is cut off") from error
        raise MediaError(f"image data is damaged: the {format} file cannot be decoded") from error


def _decode(data: bytes, format: str, max_pixels: int) -> Image.Image:
    """`decode_image` without the net under it: lets through what Pillow raises."""
    _check_canvas(data, format, max_pixels)
    with _READERS[format](BytesIO(data)) as image:  # reads headers; Image.open would apply its own, global limit
        _check_size(image.size, max_pixels)
        covered = _covered_box(image)
        image.load()
        picture = _to_rgb(image, data)
        if covered != (0, 0, *picture.size):
            canvas = Image.new("RGB", picture.size, "white")
            canvas.paste(picture.crop(covered), covered[:2])
            picture = canvas
        transposition = _TRANSPOSITIONS.get(_orientation(image))
    return picture if transposition is None else picture.transpose(transposition)


def _check_canvas(data: bytes, format: str, max_pixels: int) -> None:
    """`_check_size` for the formats whose reader takes memory for the canvas while it opens."""
    try:
        if format == "GIF":
            width, height = struct.unpack_from("<HH", data, 6)
            # A screen of nothing is common: the reader grows it to the frame. It cannot take more than Pillow's own
            # limit meanwhile, and is checked again.
            _check_size((width or 1, height or 1), max_pixels)
        elif format == "WebP":
            _check_size(_webp_canvas(data), max_pixels)
    except struct.error as error:
        raise MediaError(f"image data is incomplete: the {format} file is cut off") from error


def _check_size(size: tuple[int, int], max_pixels: int) -> None:
    width, height = size
    if width < 1 or height < 1:
        raise MediaError(f"the image has no pixels: its header says {width}x{height}")
    if width * height > max_pixels:
        raise MediaError(f"the image has {width}x{height} = {width * height} pixels, more than the limit {max_pixels}")


def _webp_canvas(data: bytes) -> tuple[int, int]:
    """Width and height from the header of the first chunk, which has one of three forms."""
    chunk = data[12:16]
    if chunk == b"VP8X":
        width, width_high, height, height_high = struct.unpack_from("<HBHB", data, 24)
        return 1 + width + (width_high << 16), 1 + height + (height_high << 16)
    if chunk == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if chunk == b"VP8 ":
        width, height = struct.unpack_from("<HH", data, 26)
        return width & 0x3FFF, height & 0x3FFF
    raise MediaError(f"image data is damaged: a WebP file does not begin with a chunk {chunk!r}")


def _covered_box(image: ImageFile.ImageFile) -> tuple[int, int, int, int]:
    """The part of the canvas that the first frame covers. Only a GIF's can be less than all of it."""
    if isinstance(image, GifImageFile) and image.dispose_extent is not None:
        return image.dispose_extent
    return 0, 0, *image.size


def _to_rgb(image: ImageFile.ImageFile, data: bytes) -> Image.Image:
    """Any mode that the six readers give -> RGB, transparency on white."""
    transparency = image.info.get("transparency")
    if image.mode == "RGB" and isinstance(image, JpegImageFile):
        return image  # nearly every picture, and `convert` would copy it
    if image.mode == "F":
        raise MediaError("floating-point pixels are not supported: nothing says which value is white; send 8 or 16 bit")
    if image.mode == "I" or image.mode in _GREY_16_MODES:
        return _grey_to_rgb(image, transparency)
    if transparency is not None and isinstance(image, PngImageFile):
        image.info["transparency"] = _png_transparent_color(image, transparency, bit_depth=data[24])
    if not image.has_transparency_data:
        return image.convert("RGB")
    layer = image.convert("RGBA")
    picture = Image.new("RGB", layer.size, "white")
    picture.paste(layer, mask=layer)
    return picture


def _grey_to_rgb(image: ImageFile.ImageFile, transparent_value: object) -> Image.Image:
    """Grey of more than 8 bits -> RGB, by scaling its full range to 0..255."""
    grey = np.asarray(image)
    bits = 16
    white_is_zero = False
    if isinstance(image, TiffImageFile):
        white_is_zero = image.tag_v2.get(_TIFF_PHOTOMETRIC) == _TIFF_WHITE_IS_ZERO
        if image.mode != "I":
            (bits,) = image.tag_v2.get(_TIFF_BITS_PER_SAMPLE, (16,))
    top = (1 << bits) - 1
    if grey.min() < 0 or grey.max() > top:
        raise MediaError("grey values outside 0 to 65535 are not supported: nothing says which is white; send 16 bit")
    table = ((np.arange(top + 1) * 255 + top // 2) // top).astype(np.uint8)
    if white_is_zero:
        table = 255 - table
    if isinstance(transparent_value, int):
        table[transparent_value] = 255
    return Image.fromarray(table[grey]).convert("RGB")


def _png_transparent_color(image: PngImageFile, transparency: object, *, bit_depth: int) -> object:
    """A PNG's transparent colour in the 8-bit terms of the decoded pixels.

    The file states it in the file's own depth, and Pillow passes that on while it decodes grey of 2 and 4 bits, and
    colours of 16, to 8. Palettes and 1 bit need nothing.
    """
    if image.mode == "L" and isinstance(transparency, int):
        return (transparency & (1 << bit_depth) - 1) * (255 // ((1 << bit_depth) - 1))
    if image.mode == "RGB" and isinstance(transparency, tuple) and bit_depth == 16:
        return tuple(value >> 8 for value in transparency)
    return transparency


def _orientation(image: ImageFile.ImageFile) -> int:
    """EXIF orientation of a loaded image, 1 (upright) if there is none. A TIFF is upright once loaded."""
    try:
        value = image.getexif().get(ExifTags.Base.Orientation, 1)
    except (SyntaxError, ValueError, TypeError, LookupError, AttributeError, OSError, EOFError, struct.error):
        return 1  # unreadable EXIF is common in otherwise sound photos, and viewers show them as they are stored
    return value if isinstance(value, int) else 1


def _is_incomplete(data: bytes, format: str) -> bool:
    """Whether a file that failed to decode ends too early, by its format's own marks."""
    if format == "PNG":
        return b"IEND" not in data[-64:]
    if format == "JPEG":
        return b"\xff\xd9" not in data[-64:]
    if format == "WebP":
        return len(data) < 8 + int.from_bytes(data[4:8], "little")
    if format == "GIF":
        return b";" not in data[-16:]
    if format == "BMP":
        return len(data) < int.from_bytes(data[2:6], "little")
    return len(data) < 8  # a TIFF has no mark of its end


def _data_url_bytes(rest: str, max_bytes: int) -> bytes:
    """What follows ``data:`` -> the bytes it carries. The MIME type and other parameters are not looked at."""
    header, comma, payload = rest.partition(",")
    if not comma:
        raise MediaError("the data URL has no comma between its header and its data")
    if not payload.strip():
        raise MediaError("the data URL has nothing after its comma")
    if any(parameter.strip().lower() == "base64" for parameter in header.split(";")):
        return _base64_bytes(payload, "the data URL's base64 part", max_bytes)
    if "base64" in header.lower():
        raise MediaError(
            f"the data URL's header {header[:80]!r} is malformed: base64 must stand alone after a semicolon"
        )
    if len(payload) > _MAX_UNENCODED:
        raise MediaError(f"a data URL without base64 may have {_MAX_UNENCODED} characters at most; send base64")
    return unquote_to_bytes(payload)


def _bare_base64(text: str, max_bytes: int) -> bytes:
    """Base64 without a ``data:`` header, taken only when an image comes out: anything else was meant as an address."""
    try:
        data = _base64_bytes(text, "the base64 text", max_bytes)
    except MediaError as error:
        raise MediaError(f"the image URL is neither a data URL nor base64 ({error}); paths are not opened") from error
    if not any(signature.match(data) for _, signature in _SIGNATURES):
        raise MediaError(
            "the image URL is neither a data URL nor the base64 of a supported image; paths are not opened "
            f"and {SUPPORTED_FORMATS} are supported"
        )
    return data


def _base64_bytes(text: str, part: str, max_bytes: int) -> bytes:
    """Decodes base64 as people send it: wrapped, percent-encoded, url-safe, with or without padding.

    ``part`` names the text in errors.
    """
    if len(text) * 3 // 4 <= max_bytes:
        # As programs send it, which is nearly always: one pass, where what follows takes ten times as long.
        with contextlib.suppress(ValueError):  # binascii.Error is one; so is what it says of characters beyond ASCII
            return base64.b64decode(text, validate=True)
    if "%" in text:
        for escape, character in _PERCENT_ENCODED.items():
            text = text.replace(escape, character).replace(escape.lower(), character)
    text = _WHITE_SPACE.sub("", text).rstrip("=").replace("-", "+").replace("_", "/")
    foreign = _FOREIGN_TO_BASE64.search(text)
    if foreign is not None:
        raise MediaError(f"{part} has the character {foreign[0]!r} at position {foreign.start()}, which is not base64")
    if len(text) % 4 == 1:
        raise MediaError(f"{part} is incomplete: no data has base64 of {len(text)} characters")
    if len(text) * 3 // 4 > max_bytes:
        raise MediaError(f"{part} holds {len(text) * 3 // 4} bytes, more than the limit of {max_bytes}")
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except binascii.Error as error:
        raise MediaError(f"{part} cannot be decoded: {error}") from error
