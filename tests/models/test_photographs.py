"""The data of the demo: photographs, patches that lie on each other, and PSNR."""

from __future__ import annotations

import math
import socket

import numpy as np
import pytest
from PIL import Image

from models import photographs
from models.photographs import TESTING, TRAINING, Patches, Photograph, load

SEED = 77


@pytest.fixture(scope="module")
def coins() -> Photograph:
    return load("coins.png", 2)


def block_means(high: np.ndarray, scale: int) -> np.ndarray:
    height, width = (length // scale for length in high.shape)
    return high.reshape(height, scale, width, scale).mean(axis=(1, 3))


def test_every_photograph_is_there_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the demo opens a connection")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    for name in (*TRAINING, *TESTING):
        photograph = load(name, 2)
        assert min(photograph.low.size) >= 150, name
        assert photograph.high_luma.std() > 0.05, f"{name} shows something"
    assert not set(TRAINING) & set(TESTING)
    assert len(TESTING) == 2


def test_a_missing_photograph_is_named() -> None:
    with pytest.raises(FileNotFoundError, match=r"scikit-image .* does not bring the photograph unicorn\.png"):
        load("unicorn.png", 2)


@pytest.mark.parametrize("scale", [2, 3])
def test_low_resolution_is_the_mean_of_blocks(scale: int) -> None:
    photograph = load("chelsea.png", scale)  # 451 × 300
    assert photograph.scale == scale
    assert photograph.low.size == (451 // scale, 300 // scale)
    assert photograph.high.size == (451 // scale * scale, 300)
    difference = photograph.low_luma - block_means(photograph.high_luma, scale)
    assert abs(difference).max() < 0.501 / 255  # each channel is rounded to 8 bits
    assert abs(difference.mean()) < 0.02 / 255


def test_luma_weighs_the_colours() -> None:
    pixels = np.array([[[255, 0, 0], [0, 255, 0], [0, 0, 255], [255, 255, 255], [10, 20, 30]]], np.uint8)
    expected = [0.299, 0.587, 0.114, 1, (2.99 + 11.74 + 3.42) / 255]
    np.testing.assert_allclose(photographs.luma(Image.fromarray(pixels))[0], expected, rtol=1e-6)


def test_psnr_of_known_errors() -> None:
    original = np.full((8, 9), 0.5, np.float32)
    assert photographs.psnr(original + np.float32(0.1), original) == pytest.approx(20, abs=1e-5)
    checks = original + np.float32(0.01) * np.where(np.indices(original.shape).sum(0) % 2, 1, -1)
    assert photographs.psnr(checks.astype(np.float32), original) == pytest.approx(40, abs=1e-4)
    half_wrong = original.copy()
    half_wrong[:4] += 0.1
    assert photographs.psnr(half_wrong, original) == pytest.approx(10 * math.log10(200), abs=1e-5)
    assert photographs.psnr(original, original) == math.inf


def test_psnr_clips_like_a_display_and_leaves_out_the_border() -> None:
    white = np.ones((6, 6), np.float32)
    assert photographs.psnr(3 * white, white) == math.inf
    assert photographs.psnr(-white, 0 * white) == math.inf
    framed = white.copy()
    framed[0], framed[:, -1] = 0, 0
    assert photographs.psnr(framed, white, border=1) == math.inf
    assert photographs.psnr(framed, white) < 10


def test_psnr_refuses_what_has_no_answer() -> None:
    with pytest.raises(ValueError, match=r"one shape, got \(4, 4\) and \(1, 4\)"):
        photographs.psnr(np.zeros((4, 4), np.float32), np.zeros((1, 4), np.float32))
    with pytest.raises(ValueError, match=r"border of 2 leaves nothing of \(4, 4\)"):
        photographs.psnr(np.zeros((4, 4), np.float32), np.zeros((4, 4), np.float32), border=2)


@pytest.mark.parametrize("method", [photographs.bicubic, photographs.cubic_spline])
def test_cubic_up_sampling_reproduces_planes(method: photographs.Enlarge) -> None:
    """Sample positions too: low-resolution pixel i covers the pixels 2i and 2i + 1 of the original."""
    rows, columns = np.indices((40, 60)).astype(np.float32)
    high = (0.1 + 0.01 * rows + 0.005 * columns).astype(np.float32)
    up = method(block_means(high, 2).astype(np.float32), 2)
    assert up.dtype == np.float32
    np.testing.assert_allclose(up[14:-14, 14:-14], high[14:-14, 14:-14], atol=2e-5)


def test_patches_lie_on_each_other(coins: Photograph) -> None:
    """However turned and mirrored: the small patch is the block mean of the large one."""
    low, high = Patches([coins], size=6, seed=SEED).batch(64)
    assert low.shape == (64, 1, 6, 6)
    assert high.shape == (64, 1, 12, 12)
    assert low.dtype == high.dtype == np.float32
    for small, large in zip(low[:, 0], high[:, 0], strict=True):
        np.testing.assert_allclose(small, block_means(large, 2), atol=0.501 / 255)


def test_patches_come_in_all_orientations_and_places() -> None:
    """From a photograph whose every pixel has a value of its own, so that a patch tells where it was cut."""
    values = np.arange(8 * 8, dtype=np.uint8).reshape(8, 8)
    image = Image.fromarray(values).convert("RGB")
    one = Photograph("numbers", image, image)
    low, _ = Patches([one], size=7, seed=SEED).batch(400)
    seen = {tuple(np.round(patch[0, ::6, ::6].ravel() * 255).astype(int)) for patch in low}
    corners = [values[r : r + 7, c : c + 7] for r in (0, 1) for c in (0, 1)]
    turned = [np.rot90(m, k) for patch in corners for m in (patch, patch[:, ::-1]) for k in range(4)]
    assert seen == {tuple(int(v) for v in patch[::6, ::6].ravel()) for patch in turned}
    assert len(seen) == 32


def test_photographs_are_drawn_by_their_size() -> None:
    black, white = (Image.new("RGB", size, colour) for size, colour in (((10, 10), 0), ((30, 10), (255, 255, 255))))
    patches = Patches([Photograph("black", black, black), Photograph("white", white, white)], size=4, seed=SEED)
    low, _ = patches.batch(2000)
    assert low.mean() == pytest.approx(0.75, abs=0.04), f"seed {SEED}"


def test_the_seed_decides_the_patches(coins: Photograph) -> None:
    batches = [Patches([coins], size=5, seed=seed).batch(3)[1] for seed in (1, 1, 2)]
    np.testing.assert_array_equal(batches[0], batches[1])
    assert not np.array_equal(batches[0], batches[2])


def test_patches_larger_than_a_photograph_are_refused(coins: Photograph) -> None:
    with pytest.raises(ValueError, match=r"patches of 1000 pixels: coins has only \(192, 151\)"):
        Patches([coins], size=1000, seed=0)


def test_the_gain_is_over_the_best_of_the_others(coins: Photograph) -> None:
    perfect = photographs.compare(coins, coins.high_luma)
    assert perfect.gain == math.inf
    copied = photographs.compare(coins, photographs.bicubic(coins.low_luma, 2))
    assert copied.psnr["model"] == copied.psnr["bicubic"]
    assert copied.psnr["cubic spline"] > copied.psnr["bicubic"]
    assert copied.gain == copied.psnr["bicubic"] - copied.psnr["cubic spline"]


def test_bicubic_error_is_pooled_over_pixels(coins: Photograph) -> None:
    brick = load("brick.png", 2)
    errors = [float(np.mean((photographs.bicubic(p.low_luma, 2) - p.high_luma) ** 2)) for p in (coins, brick)]
    sizes = [p.high_luma.size for p in (coins, brick)]
    assert photographs.bicubic_error([coins, brick]) == pytest.approx(np.average(errors, weights=sizes), rel=1e-4)
