"""Pictures in folders, one for each class."""

import importlib.util
import pickle

import pytest
import torch
from mistakes import one_line_error
from PIL import Image

from kaitian_mpi.cli.flags import parse_config
from kaitian_mpi.config import TrainConfig
from kaitian_mpi.recipes.datasets import load_data

COLORS = {"cat": (250, 10, 20), "dog": (10, 240, 30)}


def paint(path, size=(40, 20), color=(1, 2, 3), mode="RGB", **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = Image.new("RGB", size, color)
    picture.convert(mode).save(path, **options)


def load(folder, **settings):
    given = {"dataset": "imagefolder", "data_dir": str(folder), "image_size": 16}
    return load_data(TrainConfig(**given, **settings))


def pixels(dataset):
    return dataset.images[torch.arange(len(dataset))]


def test_the_middle_square_of_each_picture_is_resized(tmp_path):
    picture = Image.new("RGB", (64, 32), (255, 0, 0))
    picture.paste((0, 0, 255), (16, 0, 48, 32))  # the middle square
    (tmp_path / "cat").mkdir()
    for name, shown in (
        ("wide", picture),
        ("upright", picture.transpose(Image.Transpose.ROTATE_90)),
    ):
        shown.save(tmp_path / "cat" / f"{name}.png")
    for part in (source := load(tmp_path), pickle.loads(pickle.dumps(source))):
        for dataset in (part.train, part.validation):
            assert pixels(dataset).shape == (1, 3, 16, 16)
            inside = pixels(dataset)[0, :, 1:-1, 1:-1]  # at the edge, the filter sees the rest
            assert (inside == torch.tensor([0, 0, 255]).view(3, 1, 1)).all()
    inputs, labels = source.train[[0]]
    assert (inputs.dtype, labels.dtype) == (torch.float32, torch.int64)
    assert inputs[0, 2, 8, 8] == pytest.approx((1 - 0.406) / 0.225)
    assert len(source.train[[]][0]) == 0


def test_classes_are_folders_and_some_pictures_are_held_out(tmp_path):
    for name, color in COLORS.items():
        for number in range(5):
            paint(tmp_path / name / "deep" / f"{number}.png", (20 + number, 33), color)
    paint(tmp_path / ".hidden" / "1.png")
    (tmp_path / "cat" / "notes.txt").write_text("no picture")
    (tmp_path / "cat" / ".1.png").write_text("no picture")
    source = load(tmp_path)
    assert source.num_classes == 2
    assert (len(source.train), len(source.validation)) == (8, 2)
    for dataset in (source.train, source.validation):
        for picture, label in zip(pixels(dataset), dataset.labels, strict=True):
            assert tuple(picture[:, 0, 0].tolist()) == [*COLORS.values()][label]
    in_parts = tmp_path / "parts"
    for name, color in COLORS.items():
        paint(in_parts / "train" / name / "1.JPG", color=color)
        paint(in_parts / "valid" / name / "1.webp", color=color)
    source = load(in_parts, augment="crop")
    assert (len(source.train), len(source.validation), source.num_classes) == (2, 2, 2)
    assert (source.train.augment, source.validation.augment) == ("crop", "none")
    assert (load(in_parts / "train").train.augment) == "none"


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "1"])
def test_pictures_of_any_mode_are_rgb(tmp_path, mode):
    ending = "jpg" if mode == "CMYK" else "png"
    for number in range(2):
        paint(tmp_path / "cat" / f"{number}.{ending}", color=(255, 255, 255), mode=mode)
    assert (pixels(load(tmp_path).train) > 250).all()


def test_pictures_are_shown_as_the_camera_was_held(tmp_path):
    picture = Image.new("RGB", (32, 32), (255, 0, 0))
    picture.paste((0, 0, 255), (0, 0, 32, 16))
    exif = picture.getexif()
    exif[0x0112] = 3  # upside down
    (tmp_path / "cat").mkdir()
    for number in range(2):
        picture.save(tmp_path / "cat" / f"{number}.png", exif=exif)
    shown = pixels(load(tmp_path).train)[0]
    assert shown[:, 0, 0].tolist() == [255, 0, 0]
    assert shown[:, 15, 0].tolist() == [0, 0, 255]


def test_mistakes_are_one_line(tmp_path, monkeypatch):
    paint(tmp_path / "train" / "cat" / "1.png")
    paint(tmp_path / "train" / "cat" / "2.png")
    (tmp_path / "val" / "eel").mkdir(parents=True)
    with one_line_error("val has the class 'eel', which train does not have"):
        load(tmp_path)
    (tmp_path / "val" / "eel").rename(tmp_path / "val" / "cat")
    with one_line_error(r"no picture in a folder of .*/val; put those of each class into one"):
        load(tmp_path)
    (tmp_path / "val" / "cat" / "1.png").write_text("no picture")
    source = load(tmp_path)
    with one_line_error(r"/val/cat/1.png cannot be read as a picture \(UnidentifiedImageError"):
        source.validation[[0]]
    (tmp_path / "train" / "cat" / "1.png").unlink()
    with one_line_error(r"/train/cat/1.png cannot be read as a picture \(No such file"):
        source.train[[0]]
    with one_line_error("imagefolder requires --data-dir, with a folder of pictures for each"):
        load("")
    with one_line_error("--image-size has an effect with --dataset imagefolder only"):
        parse_config("kaitian-train", ["--dataset", "digits", "--image-size", "32"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with one_line_error(r'needs Pillow: pip install "kaitian-mpi\[images\]"'):
        load(tmp_path)
