"""Images in requests: from what a client sends to the pixels that the vision encoder takes, in a worker. No byte is
decoded before format, size in bytes and size in pixels have been checked."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

import numpy as np

from lucevisor.api.errors import ApiError, bad_parameter
from lucevisor.errors import show
from lucevisor.model.vision import (
    IMAGE_ID,
    EncoderImage,
    ImageGrid,
    ImageSize,
    Projector,
    VisionSpec,
    filled,
    resized,
)
from lucevisor.text.template import EncodedPrompt
from lucevisor.text.tokenizer import Tokenizer

FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Formats by Pillow's names; of several frames the first counts."""
MAX_PIXELS: Final = 64 * 1024 * 1024
"""Pixels of an image as sent: decoded, it takes three bytes for each."""
MAX_IMAGES: Final = 64
"""Images of one request."""


@dataclass(frozen=True, slots=True)
class ImageReader:
    """How the served model takes images; crosses process boundaries. ``cell``: side of the square of pixels that a
    token stands for. ``encoder``: tells one encoder's file from others. ``media_path``: directory of files that
    requests may name."""

    cell: int
    min_tokens: int
    max_tokens: int
    projector: Projector
    encoder: bytes
    media_path: Path | None
    max_file_bytes: int

    @classmethod
    def of(cls, spec: VisionSpec, limits: tuple[int, int], media_path: Path | None, max_file_bytes: int) -> ImageReader:
        """``limits``: least and most tokens of an image."""
        return cls(
            cell=spec.cell_pixels,
            min_tokens=limits[0],
            max_tokens=limits[1],
            projector=spec.of_projector,
            encoder=repr([spec.projector, spec.files.identities]).encode(),
            media_path=media_path,
            max_file_bytes=max_file_bytes,
        )

    def read(self, url: str, where: str) -> EncoderImage:
        """Return the image that a URL contains or names; raises ApiError naming ``where`` it stands."""
        data = self._bytes_of(url, where)
        from PIL import Image, ImageOps, UnidentifiedImageError  # where images are read alone: they take a while

        Image.MAX_IMAGE_PIXELS = None  # checked here, with another limit
        try:
            with Image.open(BytesIO(data), formats=FORMATS) as opened:
                if opened.width * opened.height > MAX_PIXELS:
                    why = f"has {opened.width} x {opened.height} pixels, more than {MAX_PIXELS}; send a smaller one"
                    raise bad_parameter(where, why, "image_too_large")
                image = ImageOps.exif_transpose(opened).convert("RGB")
        except UnidentifiedImageError:
            why = f"is no image of a known format: {', '.join(FORMATS)}"
            raise bad_parameter(where, why, "invalid_image") from None
        except (OSError, SyntaxError, EOFError, IndexError, OverflowError, ValueError) as error:  # what decoders raise
            raise bad_parameter(where, f"is damaged: {error}; send it again", "invalid_image") from None
        try:
            size = self.size_of(ImageSize(*image.size))
        except ValueError as error:
            raise bad_parameter(where, str(error), "invalid_image") from None
        if size != image.size:
            image = image.resize(size, Image.Resampling.BICUBIC)
        pixels = image.tobytes()
        grid = self.grid(size)
        return EncoderImage(size, grid, pixels, self._ids(size, pixels, grid.n_tokens))

    def size_of(self, size: ImageSize) -> ImageSize:
        """Return the size that an image is resized to; raises ValueError."""
        if self.projector.fills:
            return filled(size, self.cell, self.max_tokens)
        return resized(size, self.cell, self.min_tokens, self.max_tokens)

    def grid(self, size: ImageSize) -> ImageGrid:
        return ImageGrid(size.height // self.cell, size.width // self.cell)

    def _ids(self, size: ImageSize, pixels: bytes, n: int) -> tuple[int, ...]:
        """Return the ids of an image's tokens: 31 bits each of a hash of it and of the encoder."""
        found = hashlib.shake_256(self.encoder + repr(size).encode())
        found.update(pixels)
        numbers = np.frombuffer(found.digest(4 * n), dtype="<u4")
        return tuple((numbers & (IMAGE_ID - 1) | IMAGE_ID).tolist())

    def _bytes_of(self, url: str, where: str) -> bytes:
        scheme, _, rest = url.partition(":")
        match scheme.lower():
            case "data":
                return _decoded(rest, where)
            case "file":
                return self._file(url, where)
            case "http" | "https":
                why = "is a web address, and this server fetches none; send the image as a data: URL"
                raise bad_parameter(where, why, "unsupported_content")
        raise bad_parameter(where, f"{show(url[:40])} is not a data: URL with an image", "unsupported_content")

    def _file(self, url: str, where: str) -> bytes:
        if self.media_path is None:
            why = "is a file of the server, which vision.media_path would allow; send the image as a data: URL"
            raise bad_parameter(where, why, "unsupported_content")
        named = unquote(url[len("file:") :].removeprefix("//"))
        if named.startswith("localhost/"):
            named = named.removeprefix("localhost")
        try:  # a relative path is one in the directory, as in llama.cpp's server
            path = (self.media_path / named).resolve(strict=True)
            if not path.is_relative_to(self.media_path.resolve(strict=True)) or not path.is_file():
                raise ValueError
            if path.stat().st_size > self.max_file_bytes:
                raise bad_parameter(where, f"has more than {self.max_file_bytes} bytes", "image_too_large")
            return path.read_bytes()
        except (OSError, ValueError):
            why = "names no readable file in the directory vision.media_path of the server; send its path there"
            raise bad_parameter(where, why, "invalid_image") from None


def _decoded(rest: str, where: str) -> bytes:
    """Return the bytes of a ``data:`` URL behind its scheme."""
    kind, comma, text = rest.partition(",")
    if not comma or not kind.lower().endswith(";base64"):
        why = 'is no data: URL with base64, which is "data:image/png;base64," and the image'
        raise bad_parameter(where, why, "invalid_image")
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except ValueError:
        raise bad_parameter(where, "has invalid base64", "invalid_image") from None


def has_images(fields: Mapping[str, Any]) -> bool:
    """Return whether a decoded body may have images, which are read in a worker."""
    open_values: list[object] = [fields]
    while open_values:
        match open_values.pop():
            case dict() as found:
                kind = found.get("type")
                if found.get("images") or (isinstance(kind, str) and "image" in kind):
                    return True
                open_values += found.values()
            case list() as items:
                open_values += items
    return False


def image_part(url: str, origin: str) -> dict[str, Any]:
    """Return the part of a chat message for an image; ``origin``: its place in the client's body."""
    return {"type": "image_url", "image_url": {"url": url}, "origin": origin}


def check_part(part: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a part of type image_url with its URL alone; raises ApiError."""
    value = part.get("image_url")
    url = value.get("url") if isinstance(value, dict) else value
    if not isinstance(url, str) or not url:
        raise bad_parameter(f"{where}.image_url.url", "is missing or not a string; it is required")
    return {"type": "image", "url": url}


def take_images(messages: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return where images stand in messages that were checked, and their URLs, which messages lose."""
    found = []
    for i, message in enumerate(messages):
        content = message.get("content")
        for j, part in enumerate(content if isinstance(content, list) else ()):
            if part["type"] == "image":
                where = f"messages[{i}].content[{j}].image_url"
                if message["role"] not in ("user", "tool"):
                    why = f"is in a message of role {message['role']}; images are the user's, or a tool's"
                    raise bad_parameter(where, why, "unsupported_content")
                found.append((where, part.pop("url")))
    if len(found) > MAX_IMAGES:
        raise bad_parameter(found[MAX_IMAGES][0], f"is one image more than the {MAX_IMAGES} of a request")
    return found


def place_images(
    encoded: EncodedPrompt, images: Sequence[EncoderImage], tokenizer: Tokenizer, projector: Projector
) -> tuple[EncodedPrompt, tuple[int, ...]]:
    """Put the tokens of images in place of the template's placeholders; return the prompt, and where images start."""
    token_id = tokenizer.token_id(projector.placeholder)
    before, behind = (
        [found] if name and (found := tokenizer.token_id(name)) is not None else []
        for name in (projector.before, projector.behind)
    )
    places = [at for at, token in enumerate(encoded.ids) if token == token_id]
    if len(places) != len(images):
        why = f"messages have {len(images)} images, for which the model's chat template writes {len(places)} places"
        raise ApiError(400, f"{why}; send images in the user's messages", code="template_error", param="messages")
    ids, starts, last = list[int](), list[int](), 0
    for at, image in zip(places, images, strict=True):
        ids += encoded.ids[last:at] + before
        starts.append(len(ids))
        ids += [*image.ids, *behind]
        last = at + 1
    ids += encoded.ids[last:]
    growth = [len(before) + len(image.ids) + len(behind) - 1 for image in images]
    ends = [end + sum(n for at, n in zip(places, growth, strict=True) if at < end) for end in encoded.turn_ends]
    return EncodedPrompt(ids, ends), tuple(starts)
