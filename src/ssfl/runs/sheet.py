"""Draws a contact sheet: one PNG that shows the most confident mistakes of a model."""

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo

from ssfl.data import pictures
from ssfl.errors import RunError
from ssfl.runs import folder
from ssfl.runs.evaluate import Answer, Evaluation
from ssfl.runs.text import printable

MOST, ACROSS, SIDE, LINE, GAP = 24, 6, 170, 17, 14
MARK = {"Software": "ssfl evaluate"}
"""Metadata that is written into the PNG file. An existing file is overwritten only if it has this
metadata."""


def write(evaluation: Evaluation, target: Path) -> Path | None:
    """Writes the contact sheet of an evaluation of image files to `target`, with the most confident mistakes
    first. Returns its path, or None if there are no mistakes."""
    worst = [(one.file, one) for one in evaluation.mistakes if one.file is not None][:MOST]
    if not worst:
        return None
    _require_ours(target)
    content = io.BytesIO()
    mark = PngInfo()
    for key, value in MARK.items():
        mark.add_text(key, value)
    draw(worst, evaluation.classes, evaluation.white).save(content, "PNG", pnginfo=mark)
    folder.write_atomic(target, content.getvalue())
    return target


def draw(answers: Sequence[tuple[Path, Answer]], classes: Sequence[str], white: int) -> Image.Image:
    """Returns a picture that shows image files in rows. `answers` has each file with its prediction. Under
    each image are its predicted class with the confidence, its true class and its file name. `white` is the
    pixel value that becomes white in files with more than 8 bits per channel."""
    across = min(ACROSS, len(answers))
    down = -(-len(answers) // across)
    tall = SIDE + 3 * LINE + GAP
    sheet = Image.new("RGB", (across * (SIDE + GAP) + GAP, down * tall + GAP), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(13)
    for place, (file, answer) in enumerate(answers):
        x, y = GAP + place % across * (SIDE + GAP), GAP + place // across * tall
        shown = _picture(file, white)
        sheet.paste(shown, (x + (SIDE - shown.width) // 2, y + (SIDE - shown.height) // 2))
        lines = [
            (f"predicted {classes[answer.predicted]}, {answer.confidence:.0%}", "#8f3b00"),
            (f"true {classes[answer.label]}", "black"),
            (file.name, "#57606a"),
        ]
        for number, (line, colour) in enumerate(lines):
            pen.text((x, y + SIDE + 3 + number * LINE), _cut(line, font), fill=colour, font=font)
    return sheet


def _picture(file: Path, white: int) -> Image.Image:
    """Returns an image file in RGB, resized to fit into a square of the sheet without changing its
    proportions. `white` is the pixel value that becomes white in files with more than 8 bits per channel."""
    pixels = pictures.decode(file, 3, None, white).transpose(1, 2, 0)
    image = Image.fromarray(np.ascontiguousarray(pixels))
    scale = SIDE / max(image.size)
    size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
    return image.resize(size, Image.Resampling.LANCZOS if scale < 1 else Image.Resampling.NEAREST)


def _cut(line: str, font: ImageFont.ImageFont | ImageFont.FreeTypeFont) -> str:
    """Returns a text that is short enough to fit under an image. If `line` is too long, three dots replace
    its middle."""
    line = printable(line)
    if font.getlength(line) <= SIDE:
        return line
    half = len(line) // 2
    while half > 1 and font.getlength(f"{line[:half]}...{line[-half:]}") > SIDE:
        half -= 1
    return f"{line[:half]}...{line[-half:]}"


def _require_ours(target: Path) -> None:
    """Raises if `target` is a folder, or a file that is not an earlier contact sheet, so that no other file
    is overwritten."""
    if target.is_dir():
        raise RunError(f"{target} is a folder: name a file in it, such as {target / 'mistakes.png'}")
    if not target.exists():
        return
    try:
        with Image.open(target) as image:
            ours = image.info.get("Software") == MARK["Software"]
    except OSError:
        ours = False
    if not ours:
        raise RunError(f"{target} is not a contact sheet and is not overwritten: choose another --sheet")
