"""Images in folders, bytes that are scaled, random changes of rows."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser
from PIL import Image

import onnx_backprop as ob
from onnx_backprop.command.main import main
from onnx_backprop.training.data.images import DEVIATIONS, MEANS, SUFFIXES

RNG = np.random.default_rng(5)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes of three images, each of one colour, in several formats and sizes."""
    for number, (name, colour) in enumerate((("blue", (0, 0, 250)), ("red", (250, 10, 0)))):
        (tmp_path / "images" / name).mkdir(parents=True)
        for n, suffix in enumerate(("png", "bmp", "PNG")):
            pixels = np.full((6 + n, 9 - n, 3), colour, np.uint8) - np.uint8(number)
            Image.fromarray(pixels).save(tmp_path / "images" / name / f"{n}.{suffix}", format=suffix.upper())
    (tmp_path / "images" / "red" / "notes.txt").write_text("no image")
    return tmp_path / "images"


def test_folders_are_classes(folder: Path) -> None:
    data = ob.image_folder(folder, (4, 5), image="image")
    assert data.classes == ["blue", "red"]
    assert data["labels"].tolist() == [0, 0, 0, 1, 1, 1]
    assert (data["image"].shape, data["image"].dtype) == ((6, 3, 4, 5), np.uint8)
    assert data["image"][[4]][0, :, 1, 1].tolist() == [249, 9, 255]
    last = ob.image_folder(folder, (4, 5), channels_last=True)
    assert last["x"][[0, 5]].shape == (2, 4, 5, 3)
    np.testing.assert_array_equal(last["x"][:].transpose(0, 3, 1, 2), data["image"][:])


def test_other_images_have_the_numbers_of_the_classes_that_are_known(folder: Path) -> None:
    for path in (folder / "blue").iterdir():
        path.unlink()
    (folder / "blue").rmdir()
    data = ob.image_folder(folder, (4, 4), classes=["blue", "red", "green"])
    assert (data["labels"].tolist(), data.classes) == ([1, 1, 1], ["blue", "red", "green"])
    with pytest.raises(ob.InvalidArgumentError, match="red is none of the classes, 'blue', 'green'"):
        ob.image_folder(folder, (4, 4), classes=["blue", "green"])


def test_images_of_every_format(tmp_path: Path) -> None:
    # an ending that is left out of the table would leave a user's images out without a word
    suffixes = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
    assert suffixes == SUFFIXES
    (tmp_path / "grey").mkdir()
    for suffix in suffixes:
        Image.new("RGB", (8, 8), (120, 120, 120)).save(tmp_path / "grey" / f"image{suffix}")
    images = ob.image_folder(tmp_path, (8, 8))["x"][:]
    assert images.shape == (len(suffixes), 3, 8, 8)
    np.testing.assert_allclose(images.astype(int), 120, atol=2)


def test_what_is_no_folder_of_images_is_refused(folder: Path, tmp_path: Path) -> None:
    for path, sentence in ((tmp_path / "none", "there is no folder"), (folder / "red", "holds no folders")):
        with pytest.raises(ob.InvalidArgumentError, match=sentence):
            ob.image_folder(path, (4, 4))
    (folder / "empty").mkdir()
    with pytest.raises(ob.InvalidArgumentError, match="empty holds no images"):
        ob.image_folder(folder, (4, 4))
    (folder / "empty" / "broken.png").write_bytes(b"no image at all")
    with pytest.raises(ob.InvalidArgumentError, match=r"broken\.png is no image that Pillow reads"):
        ob.image_folder(folder, (4, 4))["x"][:]
    with pytest.raises(ob.InvalidArgumentError, match=r"size: expected \(height, width\)"):
        ob.image_folder(folder, (4, 0))


@pytest.mark.parametrize("axis", [1, 3])
def test_imagenet(axis: int) -> None:
    shape = (4, 3, 8, 6) if axis == 1 else (4, 8, 6, 3)
    x, masks = RNG.integers(0, 256, shape, np.uint8), RNG.integers(0, 3, (4, 8, 6), np.uint8)
    (batch,) = ob.Batches({"x": x, "labels": masks}, 4, shuffle=False, scale="imagenet")
    moved = np.moveaxis(x.astype(np.float64) / 255, axis, -1)
    expected = np.moveaxis((moved - MEANS) / DEVIATIONS, -1, axis)
    assert batch["x"].dtype == np.float32
    np.testing.assert_allclose(batch["x"], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(batch["labels"], masks)
    (batch,) = ob.Batches({"x": x, "labels": masks}, 4, shuffle=False, scale={"x": 1 / 255})
    np.testing.assert_allclose(batch["x"], x / 255, rtol=1e-6)


def test_scales_that_do_not_fit() -> None:
    x = np.zeros((2, 3, 4, 4), np.uint8)
    cases: list[tuple[Any, Any, str]] = [
        ({"x": x, "y": x}, 1 / 255, "which of the arrays.*'x', 'y'"),
        ({"x": x.astype(np.float32)}, 1 / 255, "Images of bytes are: none"),
        ({"x": x}, {"z": 1}, "there is no array 'z'"),
        ({"x": x}, {"x": "vgg"}, "expected a number or 'imagenet', got 'vgg'"),
        ({"x": x[:, :2]}, "imagenet", "of three channels"),
    ]
    for arrays, scale, sentence in cases:
        with pytest.raises(ob.InvalidArgumentError, match=sentence):
            ob.Batches(arrays, 2, scale=scale)


def test_changes_depend_on_the_seed_the_epoch_and_the_row_alone() -> None:
    x, masks = RNG.integers(0, 256, (9, 3, 16, 16), np.uint8), RNG.integers(0, 3, (9, 16, 16))
    changes = ob.augment("flip", "crop", "jitter")

    def epoch(size: int, number: int, seed: int = 3) -> dict[str, np.ndarray]:
        loader = ob.Batches({"x": x, "labels": masks}, size, seed=seed, shuffle=False, transform=changes)
        loader.set_epoch(number)
        batches = list(loader)
        return {name: np.concatenate([batch[name] for batch in batches]) for name in ("x", "labels")}

    first = epoch(4, 0)
    for name, array in epoch(9, 0).items():
        np.testing.assert_array_equal(array, first[name])
    assert not np.array_equal(epoch(4, 1)["x"], first["x"])
    assert not np.array_equal(epoch(4, 0, seed=4)["x"], first["x"])
    assert (first["x"].dtype, first["x"].shape) == (np.uint8, x.shape)
    shards = [list(ob.Batches({"x": x, "labels": masks}, 4, seed=3, transform=changes).shards(n, 2)) for n in (0, 1)]
    whole = list(ob.Batches({"x": x, "labels": masks}, 4, seed=3, transform=changes))
    for n, batch in enumerate(whole):
        np.testing.assert_array_equal(np.concatenate([shard[n]["x"] for shard in shards]), batch["x"])


def test_images_and_masks_move_together() -> None:
    """A mask that is the image's first channel stays that."""
    x = RNG.integers(0, 256, (40, 1, 16, 24), np.uint8)
    loader = ob.Batches({"x": x, "mask": x[:, 0]}, 40, shuffle=False, transform=ob.augment("flip", "crop"))
    (batch,) = loader
    np.testing.assert_array_equal(batch["x"][:, 0], batch["mask"])
    moved = [not np.array_equal(a, b) for a, b in zip(batch["mask"], x[:, 0], strict=True)]
    assert sum(moved) > 30
    (flipped,) = ob.Batches({"x": x}, 40, shuffle=False, transform=ob.augment("flip"))
    same = [np.array_equal(a, b) for a, b in zip(flipped["x"], x, strict=True)]
    mirrored = [np.array_equal(a, b[..., ::-1]) for a, b in zip(flipped["x"], x, strict=True)]
    assert all(a != b for a, b in zip(same, mirrored, strict=True))
    assert 8 < sum(same) < 32
    with pytest.raises(ob.InvalidArgumentError, match="augment: expected some of 'flip', 'crop', 'jitter', got 'turn'"):
        ob.augment("turn")


def rows_of(arrays: dict[str, np.ndarray], **options: Any) -> dict[str, np.ndarray]:
    names = options.pop("names", ("flip", "crop"))
    (batch,) = ob.Batches(arrays, 40, shuffle=False, transform=ob.augment(*names, **options))
    return batch


def test_any_number_of_channels_moves_with_a_mask() -> None:
    masks = RNG.random((40, 16, 24)) < 0.3
    for channels in (2, 3, 4, 7):
        x = np.repeat(masks[:, None], channels, 1).astype(np.float32)
        for arrays in ({"x": x, "mask": masks}, {"x": x.transpose(0, 2, 3, 1), "mask": masks}):
            batch = rows_of(arrays)
            images = batch["x"] if batch["x"].shape[1] == channels else batch["x"].transpose(0, 3, 1, 2)
            for channel in range(channels):
                np.testing.assert_array_equal(images[:, channel], batch["mask"])


def test_a_cube_has_the_channels_where_the_image_has_them() -> None:
    mask = RNG.random((40, 16, 16)) < 0.3
    for axis in (1, -1):
        x = np.stack([mask] * 3, axis).astype(np.float32)
        cube = np.stack([mask] * 16, axis).astype(np.float32)
        for options in ({}, {"images": ["x"], "masks": ["target"]}):
            batch = rows_of({"x": x, "target": cube}, **options)
            np.testing.assert_array_equal(np.take(batch["x"], 0, axis), np.take(batch["target"], 7, axis))


def test_images_of_several_sizes_show_the_same() -> None:
    """A crop moves an image and its enlargement by the same share."""
    small = RNG.random((40, 3, 16, 24)).astype(np.float32)
    large = small.repeat(2, 2).repeat(2, 3)
    batch = rows_of({"x": small, "target": large})
    np.testing.assert_array_equal(batch["x"].repeat(2, 2).repeat(2, 3), batch["target"])
    assert not np.array_equal(batch["x"], small)
    with pytest.raises(ob.InvalidArgumentError, match="crop: the sides are no multiples of each other: 'x' 16x24"):
        rows_of({"x": small, "target": small[..., :-1]})


def test_ambiguous_shapes_are_refused() -> None:
    x, boxes = RNG.random((40, 3, 16, 16)).astype(np.float32), RNG.random((40, 5, 4)).astype(np.float32)
    masks = (x[:, :1] > 0.5).astype(np.float32)
    cases: list[tuple[dict[str, np.ndarray], tuple[str, ...], str]] = [
        ({"x": x, "boxes": boxes}, ("flip",), r"'boxes', of the shape \(5, 4\), is no image or mask of 16x16"),
        ({"x": x, "mask": masks}, ("jitter",), "jitter: 'x', 'mask' have the shapes of images"),
        ({"x": boxes, "y": boxes[..., :3]}, ("flip",), "which are the images, and which the masks, of 'x'"),
        ({"x": x[:, 0, 0]}, ("flip",), "which are the images, and which the masks, of 'x'"),
    ]
    for arrays, names, sentence in cases:
        with pytest.raises(ob.InvalidArgumentError, match=sentence):
            rows_of(arrays, names=names)
    kept = rows_of({"x": x, "boxes": boxes}, images=["x"])
    np.testing.assert_array_equal(kept["boxes"], boxes)
    assert not np.array_equal(kept["x"], x)
    named = rows_of({"x": x, "mask": masks}, names=("jitter",), images=["x"], masks=["mask"])
    np.testing.assert_array_equal(named["mask"], masks)
    assert not np.array_equal(named["x"], x)
    with pytest.raises(ob.InvalidArgumentError, match="augment: there is no 'z'. There are 'x'"):
        rows_of({"x": x}, images=["z"])
    with pytest.raises(ob.InvalidArgumentError, match="images: expected a list of names, got 'x'"):
        ob.augment("flip", images="x")


def test_a_custom_transform() -> None:
    x = np.arange(12, dtype=np.float32).reshape(6, 2)

    def noisy(row: dict[str, np.ndarray], rng: np.random.Generator) -> dict[str, Any]:
        return {"x": row["x"] + rng.standard_normal(2), "y": row["y"]}

    loader = ob.Batches({"x": x, "y": x}, 3, transform=noisy)
    first, again = list(loader), list(loader)
    np.testing.assert_array_equal(first[1]["x"], again[1]["x"])
    assert not np.array_equal(first[0]["x"], first[0]["y"])
    wrong: list[Any] = [lambda row, _: {"x": row["x"]}, lambda row, _: {"x": [1] * int(row["y"][0]), "y": 1}]
    for transform in wrong:
        with pytest.raises(ob.InvalidArgumentError, match="transform: expected rows with 'x', 'y', each of one shape"):
            next(iter(ob.Batches({"x": x, "y": x}, 3, transform=transform)))


def classifier() -> Any:
    model = parser.parse_model("""
        <ir_version: 10, opset_import: ["": 18]>
        g (float[N, 3, 4, 4] image) => (float[N, 2] y) {
            p = GlobalAveragePool (image) f = Flatten (p) y = MatMul (f, w) }""")
    weights = RNG.normal(0, 0.1, (3, 2)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weights, "w"))
    return model


def test_bytes_are_warned_of_once() -> None:
    graph = ob.training_graph(classifier(), loss="softmax_cross_entropy", optimizer="sgd")
    trainer = ob.Trainer(graph)
    x = RNG.integers(0, 256, (2, 3, 4, 4), np.uint8)
    with pytest.warns(
        ob.OnnxBackpropWarning, match=r"'image' gets bytes of 0 … \d+ as they are.*scale=.*'image': 1/255"
    ):
        trainer.step(x, [0, 1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.step(x, [0, 1])
        ob.Trainer(graph).step(x.astype(np.float32), [0, 1])
        ob.Trainer(graph).step(x // 255, [0, 1])


def test_a_folder_on_the_command_line(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(classifier(), tmp_path / "model.onnx")
    options = ["--data", str(folder), "--layout", "classes", "--scale", "1/255", "--augment", "flip,crop"]
    more = ["--loss", "softmax_cross_entropy", "--epochs", "40", "--learning-rate", "0.1", "--batch-size", "3"]
    where = ["train", str(tmp_path / "model.onnx"), "-o", str(tmp_path / "out.onnx")]
    held_out = tmp_path / "held out"  # has the second class alone
    shutil.copytree(folder / "red", held_out / "red")
    assert main([*where, *options, *more, "--evaluation", str(held_out), "--metrics", "accuracy"]) == 0
    printed = capsys.readouterr().out
    assert "image uint8 6×3×4×4" in printed
    assert "-> 1\n" in printed[printed.index("accuracy:") :]
    trained = ob.session(tmp_path / "out.onnx")
    pixels = ob.image_folder(folder, (4, 4))["x"][:].astype(np.float32) / 255
    assert np.asarray(trained.run(None, {"image": pixels})[0]).argmax(1).tolist() == [0, 0, 0, 1, 1, 1]
    for wrong, sentence in (
        (["--scale", "x"], "--scale: expected a number"),
        (["--size", "4"], "--size: expected HEIGHT"),
    ):
        assert main([*where, "--force", *options, *more, *wrong]) == 2
        assert sentence in " ".join(capsys.readouterr().err.split())


def test_albumentations_changes_the_same_rows_alike_in_a_resumed_epoch() -> None:
    """The function of docs/data.md."""
    library: Any = pytest.importorskip("albumentations", reason="albumentations is not installed here")
    pipeline = library.Compose([library.HorizontalFlip(p=0.5), library.RandomBrightnessContrast(p=1)])
    rng = np.random.default_rng(4)
    image, mask = rng.integers(0, 256, (8, 16, 16, 3), np.uint8), rng.integers(0, 3, (8, 16, 16), np.uint8)

    def augmented(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        pipeline.set_random_seed(int(rng.integers(2**31)))
        return row | pipeline(image=row["image"], mask=row["mask"])

    batches = ob.Batches({"image": image, "mask": mask}, 4, transform=augmented, scale={"image": 1 / 255})
    whole, again = list(batches), list(batches.since(1))
    np.testing.assert_array_equal(again[0]["image"], whole[1]["image"])
    np.testing.assert_array_equal(again[0]["mask"], whole[1]["mask"])
    assert (whole[0]["image"].dtype, whole[0]["mask"].dtype) == (np.float32, np.uint8)
    plain = next(iter(ob.Batches({"image": image, "mask": mask}, 4)))
    flipped = [bool((a != b).any()) for a, b in zip(whole[0]["mask"], plain["mask"], strict=True)]
    assert all(
        (a == (b[:, ::-1] if f else b)).all() for a, b, f in zip(whole[0]["mask"], plain["mask"], flipped, strict=True)
    )
    batches.set_epoch(1)
    assert not np.array_equal(next(iter(batches))["image"], whole[0]["image"])


def _of_one(tmp_path: Path, image: Image.Image, name: str = "1.png", **settings: Any) -> np.ndarray:
    (tmp_path / "one").mkdir()
    image.save(tmp_path / "one" / name, **settings)
    return ob.image_folder(tmp_path, (image.height, image.width))["x"][:][0]


@pytest.mark.parametrize("name", ["1.png", "1.tif", "1.ppm"])
def test_grey_of_16_bits_is_scaled(tmp_path: Path, name: str) -> None:
    numbers = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    pixels = _of_one(tmp_path, Image.fromarray(numbers), name)
    np.testing.assert_array_equal(pixels, np.broadcast_to(np.round(numbers / 257), (3, 256, 256)))


@pytest.mark.parametrize(("kind", "words"), [("int32", "integers of 32"), ("float32", "floats of 32")])
def test_numbers_without_a_range_are_refused(tmp_path: Path, kind: str, words: str) -> None:
    with pytest.raises(ob.InvalidArgumentError, match=rf"one.1\.tif: expected 8 or 16 bits, got {words}"):
        _of_one(tmp_path, Image.fromarray(np.ones((4, 4), kind)), "1.tif")


def test_alpha_is_left_out_and_exif_turns(tmp_path: Path) -> None:
    pixels = RNG.integers(0, 256, (4, 4, 4), np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise
    turned = _of_one(tmp_path, Image.fromarray(pixels), exif=exif)
    np.testing.assert_array_equal(turned, np.rot90(pixels[..., :3], -1).transpose(2, 0, 1))
