"""Finding the fonts: a folder given by name, or the system's; text faces and the emoji face, cached a process.

python -m model.demo.fonts FOLDER     # collect them from the system
"""

from __future__ import annotations

import argparse
import shutil
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from model.demo.words import PICTOGRAMS

EMOJI_FACE = "NotoColorEmoji.ttf"
EMOJI_SIZE = 109  # the one size of the bitmap font
SYSTEM_FONTS = Path("/usr/share/fonts")

# The faces pictures are printed in. A face that is missing is an error, so that two machines draw the same pictures.
TEXT_FACES = (
    "DejaVuSans.ttf",
    "DejaVuSans-Bold.ttf",
    "DejaVuSansMono.ttf",
    "DejaVuSerif-Bold.ttf",
    "LiberationSans-Regular.ttf",
    "LiberationSans-Bold.ttf",
    "LiberationSans-Italic.ttf",
    "LiberationSans-BoldItalic.ttf",
    "LiberationSerif-Regular.ttf",
    "LiberationSerif-Bold.ttf",
    "LiberationSerif-Italic.ttf",
    "LiberationSerif-BoldItalic.ttf",
    "LiberationMono-Regular.ttf",
    "LiberationMono-Bold.ttf",
    "LiberationSansNarrow-Regular.ttf",
    "LiberationSansNarrow-Bold.ttf",
    "FreeMonoBold.ttf",
)
DEFAULT_FACE = ""  # stands for the face that comes with Pillow


class FontError(FileNotFoundError):
    """A font the pictures need is not there; the message names it and where it was looked for."""


@dataclass(frozen=True)
class Pictogram:
    """A pictogram's RGBA bitmap, cropped to what is drawn, and sample colours of its rim, uint8 [n, 3]."""

    bitmap: Image.Image
    rim: np.ndarray


@dataclass
class Fonts:
    """The fonts of one folder (searched with its subfolders)."""

    folder: Path
    _paths: dict[str, Path] = field(default_factory=dict)

    def __post_init__(self) -> None:
        found = {path.name: path for path in sorted(self.folder.rglob("*.ttf"))}
        missing = [name for name in (*TEXT_FACES, EMOJI_FACE) if name not in found]
        if missing:
            raise FontError(f"no {', '.join(missing)} under {self.folder}")
        self._paths = {name: found[name] for name in (*TEXT_FACES, EMOJI_FACE)}
        self.text = lru_cache(maxsize=256)(self._text)
        self.pictogram = lru_cache(maxsize=None)(self._pictogram)

    @property
    def paths(self) -> list[Path]:
        """The files used."""
        return list(self._paths.values())

    def _text(self, face: str, size: int) -> ImageFont.FreeTypeFont:
        """A text face at a size in pixels."""
        if face == DEFAULT_FACE:
            font = ImageFont.load_default(size)
            if not isinstance(font, ImageFont.FreeTypeFont):
                raise FontError("this Pillow was built without FreeType")
            return font
        return ImageFont.truetype(str(self._paths[face]), size, layout_engine=ImageFont.Layout.BASIC)

    def _pictogram(self, name: str) -> Pictogram:
        """The bitmap of a pictogram by its noun."""
        font = ImageFont.truetype(str(self._paths[EMOJI_FACE]), EMOJI_SIZE, layout_engine=ImageFont.Layout.BASIC)
        canvas = Image.new("RGBA", (160, 160), (0, 0, 0, 0))
        ImageDraw.Draw(canvas).text((8, 8), PICTOGRAMS[name].character, font=font, embedded_color=True)
        box = canvas.getchannel("A").point([0] * 128 + [255] * 128).getbbox()
        if box is None:
            raise FontError(f"{EMOJI_FACE} has no picture of {name}")
        bitmap = canvas.crop(box)
        pixels = np.asarray(bitmap)
        solid = np.pad(pixels[:, :, 3] >= 128, 1)
        inside = solid[2:, 1:-1] & solid[:-2, 1:-1] & solid[1:-1, 2:] & solid[1:-1, :-2]
        rim = pixels[:, :, :3][solid[1:-1, 1:-1] & ~inside]
        return Pictogram(bitmap, rim[:: max(1, len(rim) // 48)])


@cache
def find_fonts(folder: Path | None = None) -> Fonts:
    """The fonts of ``folder``, or of the system when none is given.

    Raises:
        FontError: if a face is missing.
    """
    return Fonts(folder if folder is not None else SYSTEM_FONTS)


def main() -> None:
    """Copies the faces that the pictures need into one folder, to take to a machine without them."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for path in find_fonts().paths:
        shutil.copyfile(path, folder / path.name)
    total = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{folder}: {len(list(folder.iterdir()))} fonts, {total / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
