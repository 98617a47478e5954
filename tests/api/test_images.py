"""Images of requests: what is read, and what is refused before it is decoded."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path

import pytest

from lucevisor.api import images
from lucevisor.api.errors import ApiError
from lucevisor.api.images import ImageReader, has_images, place_images
from lucevisor.model.vision import GEMMA4V, IMAGE_ID, PROJECTORS, QWEN3VL, EncoderImage, ImageGrid, ImageSize
from lucevisor.text.template import EncodedPrompt
from tests.e2e.vision_files import data_url, png

WHERE = "messages[0].content[0].image_url"


def reader(folder: Path | None = None, **changes: object) -> ImageReader:
    fields = {"cell": 16, "min_tokens": 8, "max_tokens": 64, "projector": PROJECTORS[QWEN3VL], "encoder": b"x"}
    return ImageReader(**{**fields, "media_path": folder, "max_file_bytes": 1 << 20, **changes})  # type: ignore[arg-type]


class TestRead:
    @pytest.fixture(autouse=True)
    def _pillow(self) -> None:
        pytest.importorskip("PIL")

    def test_an_image_has_the_size_of_whole_tokens_and_ids_of_its_content(self) -> None:
        found, other = (reader().read(data_url(png(seed)), WHERE) for seed in (1, 2))
        assert found.size == (64, 48)
        assert found.grid == (3, 4)
        assert len(found.pixels) == 3 * 64 * 48
        assert len(found.ids) == len(set(found.ids)) == 12
        assert all(IMAGE_ID <= i < 2**32 for i in found.ids)
        assert found == reader().read(data_url(png(1)), WHERE)
        assert set(found.ids).isdisjoint(other.ids)
        assert set(found.ids).isdisjoint(reader(encoder=b"y").read(data_url(png(1)), WHERE).ids)

    @pytest.mark.parametrize("size", [(1, 1), (300, 5), (16, 16), (2000, 1000), (999, 1), (33, 4000)])
    def test_every_size_comes_within_the_budget_or_is_refused(self, size: tuple[int, int]) -> None:
        if max(size) > 200 * min(size):
            with pytest.raises(ApiError, match="200 times"):
                reader().read(data_url(png(0, *size)), WHERE)
            return
        found = reader().read(data_url(png(0, *size)), WHERE)
        assert 1 <= len(found.ids) <= 64
        assert found.size.width % 16 == found.size.height % 16 == 0

    @pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
    @pytest.mark.parametrize("mode", ["RGB", "L", "P"])
    def test_formats(self, kind: str, mode: str) -> None:
        from PIL import Image

        file = io.BytesIO()
        Image.new(mode if (kind, mode) not in {("JPEG", "P"), ("WEBP", "P")} else "RGB", (40, 40)).save(file, kind)
        assert reader().read(data_url(file.getvalue()), WHERE).size == (48, 48)

    def test_more_pixels_than_the_limit_are_not_decoded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(images, "MAX_PIXELS", 70 * 50 - 1)
        with pytest.raises(ApiError, match="70 x 50 pixels, more than 3499"):
            reader().read(data_url(png(1)), WHERE)

    def test_damage_is_refused_wherever_it_is(self) -> None:
        data = png(1, 300, 200)
        refused = list[str | None]()
        for at in range(0, len(data), 7):
            for changed in (data[:at], data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :]):
                try:
                    reader().read(data_url(changed), WHERE)
                except ApiError as error:
                    refused.append(error.param)
        assert set(refused) == {WHERE}
        assert len(refused) > len(data) // 7

    def test_text_in_an_image_that_is_too_large_says_that_the_image_is_damaged(self) -> None:
        text = b"a\0\0" + zlib.compress(b"a" * (2 << 20))
        chunk = struct.pack(">I", len(text)) + b"zTXt" + text + struct.pack(">I", zlib.crc32(b"zTXt" + text))
        data = png(1)
        with pytest.raises(ApiError, match="is damaged: Decompressed data too large"):
            reader().read(data_url(data[:33] + chunk + data[33:]), WHERE)

    def test_files_come_from_one_directory(self, tmp_path: Path) -> None:
        media = tmp_path / "media"
        media.mkdir()
        for path in (media / "a b.png", tmp_path / "secret.png"):
            path.write_bytes(png(1))
        (media / "link.png").symlink_to(tmp_path / "secret.png")
        own = reader(media)
        (media / "sub").mkdir()
        (media / "sub" / "ü#?.png").write_bytes(png(1))
        given = ["a%20b.png", "a b.png", "sub/ü#?.png", "sub/../a b.png", f"localhost{media}/a b.png"]
        for url in ((media / "a b.png").as_uri(), *(f"file://{path}" for path in given)):
            assert own.read(url, WHERE) == own.read(data_url(png(1)), WHERE)
        for url in (
            (tmp_path / "secret.png").as_uri(),
            (media / "link.png").as_uri(),
            f"file://{media}/../secret.png",
            media.as_uri(),
            "file:///dev/zero",
            f"file://host{media}/a%20b.png",
            "file:///%00",
            "file://../secret.png",
            "file://%2e%2e/secret.png",
            "file://link.png",
            "file://",
        ):
            with pytest.raises(ApiError, match=r"no readable file in the directory vision\.media_path"):
                own.read(url, WHERE)
        with pytest.raises(ApiError, match="more than 10 bytes"):
            reader(media, max_file_bytes=10).read((media / "a b.png").as_uri(), WHERE)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("https://example.org/a.png", "fetches none; send the image as a data: URL"),
        ("HTTP://example.org/a.png", "fetches none"),
        ("file:///etc/passwd", "vision.media_path would allow"),
        ("ftp://example.org/a.png", "is not a data: URL"),
        ("data:image/png,hello", "no data: URL with base64"),
        ("data:image/png;base64", "no data: URL with base64"),
        ("data:image/png;base64,!!!", "invalid base64"),
        ("hello", "is not a data: URL"),
    ],
)
def test_other_addresses_are_refused(url: str, words: str) -> None:
    with pytest.raises(ApiError, match=words) as found:
        reader().read(url, WHERE)
    assert found.value.param == WHERE


class Words:
    """A tokenizer with one special token."""

    def token_id(self, text: str) -> int:
        return {"<|image>": 7, "<image|>": 8}.get(text, 9)


def image(n: int, first: int) -> EncoderImage:
    return EncoderImage(ImageSize(1, n), ImageGrid(n, 1), b"", tuple(range(first, first + n)))


def test_images_take_the_places_of_placeholders() -> None:
    prompt = EncodedPrompt([1, 9, 2, 3, 9, 4], [3, 6])
    found, starts = place_images(prompt, [image(3, 100), image(2, 200)], Words(), PROJECTORS[QWEN3VL])  # type: ignore[arg-type]
    assert found.ids == [1, 100, 101, 102, 2, 3, 200, 201, 4]
    assert found.turn_ends == [5, 9]
    assert starts == (1, 6)
    with pytest.raises(ApiError, match=r"3 images, for which .* writes 2 places"):
        place_images(prompt, [image(1, 1)] * 3, Words(), PROJECTORS[QWEN3VL])  # type: ignore[arg-type]


def test_tokens_stand_around_images_where_the_template_writes_none() -> None:
    prompt = EncodedPrompt([1, 9, 2, 9, 4], [3, 5])
    found, starts = place_images(
        prompt,
        [image(2, 100), image(1, 200)],
        Words(),  # type: ignore[arg-type]
        PROJECTORS[GEMMA4V],
    )
    assert found.ids == [1, 7, 100, 101, 8, 2, 7, 200, 8, 4]
    assert found.turn_ends == [6, 10]
    assert starts == (2, 7)


def test_bodies_with_images_are_known_before_they_are_read() -> None:
    assert not has_images({"messages": [{"role": "user", "content": "an image_url"}]})
    for content in ([{"type": "image_url"}], [{"type": "tool_result", "content": [{"type": "image"}]}]):
        assert has_images({"messages": [{"role": "user", "content": content}]})
    assert has_images({"prompt": "x", "images": ["aGk="]})
    assert has_images({"input": [{"content": [{"type": "input_image"}]}]})
