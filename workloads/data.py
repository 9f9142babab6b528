"""Datasets: where they come from, and how batches of them are made.

A dataset here answers a list of indices with a whole batch, ``(inputs, targets)``. Images are
unsigned bytes ``[N, channels, height, width]`` until they are on the device, where `ImageInput`
turns them into what a model reads; text is byte-level tokens ``[N, length]``.
"""

import gzip
import importlib.util
import os
import signal
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler

if TYPE_CHECKING:
    from torchvision.datasets import VisionDataset

Batch: TypeAlias = tuple[Tensor, Tensor]
BatchDataset: TypeAlias = "Dataset[Batch]"

IGNORED = -100
"""Target of a position that does not count in the loss (torch's default)."""
MASK_TOKEN = 256
BYTE_VOCABULARY = 264
"""256 bytes, the mask, and padding to a multiple of 8."""

_TEXT_BYTES = 2 << 20
_SYNTHETIC_IMAGES = 1024
_SYNTHETIC_CLASSES = 10
_TEST_BLOCKS = 64


class DataError(Exception):
    """A dataset is not where it was looked for; the message says where, and how to get it."""


@dataclass(frozen=True, slots=True)
class Data:
    """A dataset split in two."""

    train: BatchDataset
    train_size: int
    test: BatchDataset
    test_size: int
    classes: int
    """Labels of an image dataset; 0 for text."""


class Images(Dataset[Batch]):
    """Images in memory.

    Args:
        images: Unsigned bytes ``[N, channels, height, width]``.
        labels: Classes ``[N]``.
    """

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images = images
        self.labels = labels.long()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, indices: list[int]) -> Batch:
        return self.images[indices], self.labels[indices]


class FolderImages(Dataset[Batch]):
    """Images in a folder a class, decoded when they are asked for.

    Args:
        root: Folder with one folder of JPEG or PNG files a class.
        side: Pixels a side of the square that each image is cut to.
        augment: Random crop and flip (training) instead of the middle square.
    """

    def __init__(self, root: Path, side: int, *, augment: bool) -> None:
        from torchvision import transforms  # noqa: PLC0415 - costs a second, needed here only
        from torchvision.datasets import ImageFolder  # noqa: PLC0415

        cut: list[object] = (
            [transforms.RandomResizedCrop(side), transforms.RandomHorizontalFlip()]
            if augment
            else [transforms.Resize(round(side * 256 / 224)), transforms.CenterCrop(side)]
        )
        self._folder = ImageFolder(root, transforms.Compose([*cut, transforms.PILToTensor()]))
        self.classes = len(self._folder.classes)

    def __len__(self) -> int:
        return len(self._folder)

    def __getitem__(self, indices: list[int]) -> Batch:
        samples = [self._folder[index] for index in indices]
        return torch.stack([image for image, _ in samples]), torch.tensor([c for _, c in samples])


class Text(Dataset[Batch]):
    """Byte tokens cut into samples of equal length.

    A causal model gets each block and the same block one token later. A masked model (BERT) gets
    blocks with 15 % of the tokens masked, drawn anew for each combination of samples.

    Args:
        tokens: Unsigned bytes ``[T]``.
        length: Tokens a sample.
        mask_seed: Given for a masked model.
    """

    def __init__(self, tokens: Tensor, length: int, *, mask_seed: int | None) -> None:
        count = (len(tokens) - 1) // length
        self._inputs = tokens[: count * length].view(count, length)
        self._targets = tokens[1 : count * length + 1].view(count, length)
        self._mask_seed = mask_seed

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, indices: list[int]) -> Batch:
        inputs = self._inputs[indices].long()
        if self._mask_seed is None:
            return inputs, self._targets[indices].long()
        drawn = zlib.crc32(repr((self._mask_seed, indices)).encode())
        masked = torch.rand(inputs.shape, generator=torch.Generator().manual_seed(drawn)) < 0.15
        return inputs.masked_fill(masked, MASK_TOKEN), inputs.masked_fill(~masked, IGNORED)


class ImageInput(nn.Module):
    """Bytes to what an image model reads: three channels, its size, mean 0 and deviation 1.

    Args:
        side: Pixels a side of the model's input; other sizes are resized (bilinear).
    """

    def __init__(self, side: int) -> None:
        super().__init__()
        self._side = side

    def forward(self, images: Tensor) -> Tensor:
        """``[N, 1 or 3, h, w]`` bytes to ``[N, 3, side, side]`` floats, on the same device."""
        scaled = images.float().div_(127.5).sub_(1.0)
        if scaled.shape[-2:] != (self._side, self._side):
            size = (self._side, self._side)
            scaled = nn.functional.interpolate(scaled, size, mode="bilinear", antialias=False)
        return scaled.expand(-1, 3, -1, -1)


class Batches(Sampler[list[int]]):
    """Batches of one rank's indices, from any batch on, so that a resumed run skips what it saw.

    A last batch that is not full is left out, unless it is the only one: batch normalisation
    cannot learn from a single sample.
    """

    def __init__(self, sampler: "DistributedSampler[int]", batch_size: int) -> None:
        self.sampler = sampler
        self.batch_size = batch_size
        self.start = 0

    def __len__(self) -> int:
        """Batches in a whole epoch."""
        return max(1, len(self.sampler) // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        indices = list(self.sampler)
        for batch in range(self.start, len(self)):
            yield indices[batch * self.batch_size : (batch + 1) * self.batch_size]


def read(
    dataset: BatchDataset, batches: Sampler[list[int]], *, workers: int, seed: int, pin: bool
) -> Iterator[Batch]:
    """Reads batches, in `workers` other processes if that is more than 0.

    These processes do not heed SIGTERM: sent to the whole group, it would end them before the
    checkpoint is written, and torch then raises in the training process. They end with it.
    """
    reader = DataLoader(
        dataset,
        sampler=batches,
        batch_size=None,
        num_workers=workers,
        pin_memory=pin,
        generator=torch.Generator().manual_seed(seed),
        worker_init_fn=_outlive_sigterm,
    )
    # A forked process inherits what is blocked, so that none is ever without protection.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        return iter(reader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _outlive_sigterm(_worker: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def load_images(
    name: str, *, side: int, seed: int, data_dir: Path | None = None, download: bool = False
) -> Data:
    """An image dataset by its name in `families.DATASETS`.

    Args:
        name: digits, mnist, cifar10, cifar100, imagenet or synthetic.
        side: Pixels a side that the model reads (imagenet and synthetic are made to fit).
        seed: Decides the synthetic images.
        data_dir: Where to look; None: the usual places, see `search_roots`.
        download: Fetch MNIST or CIFAR into the first of those places if it is nowhere.

    Raises:
        DataError: the data was not found, or could not be read.
    """
    if name == "digits":
        return _digits()
    if name == "synthetic":
        return _synthetic_images(side, seed)
    roots = search_roots(data_dir)
    if name == "imagenet":
        return _imagenet(roots, side)
    return _downloadable(name, roots, download=download)


def load_text(name: str, *, length: int, seed: int, masked: bool) -> Data:
    """A text dataset by its name in `families.DATASETS`, a tenth of it kept for the test.

    Args:
        name: stdlib-text or synthetic.
        length: Tokens a sample.
        seed: Decides synthetic text and masks.
        masked: For a model that fills masks in (BERT), not one that continues a text.
    """
    tokens = _stdlib_text() if name == "stdlib-text" else _synthetic_text(seed)
    border = len(tokens) * 9 // 10
    tested = tokens[border:][: _TEST_BLOCKS * length + 1]
    train = Text(tokens[:border], length, mask_seed=seed if masked else None)
    test = Text(tested, length, mask_seed=seed + 1 if masked else None)
    return Data(train, len(train), test, len(test), classes=0)


def search_roots(data_dir: Path | None) -> list[Path]:
    """Folders where datasets are looked for, in order: the one given, or the usual places."""
    if data_dir is not None:
        return [data_dir.expanduser()]
    named = os.environ.get("RLTUNE_DATA_DIR")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return [*([Path(named)] if named else []), Path("data"), cache / "rltune" / "data"]


def _digits() -> Data:
    """scikit-learn's 1,797 handwritten digits (8x8 pixels, 17 grey levels); 360 for the test."""
    found = importlib.util.find_spec("sklearn")
    if found is None or not found.submodule_search_locations:
        raise DataError("--dataset digits comes with scikit-learn: pip install scikit-learn")
    # Read from the package's folder: importing it costs a second of each run's start.
    table = Path(found.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"
    try:
        with gzip.open(table) as file:
            rows = np.loadtxt(file, delimiter=",", dtype=np.int64)
    except (OSError, ValueError) as error:
        raise DataError(f"scikit-learn's digits cannot be read: {error}") from error
    images = torch.from_numpy((rows[:, :64] * 255 // 16).astype(np.uint8)).view(-1, 1, 8, 8)
    labels = torch.from_numpy(rows[:, 64])
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    test, train = order[:360], order[360:]
    return _split(
        Images(images[train], labels[train]), Images(images[test], labels[test]), classes=10
    )


def _synthetic_images(side: int, seed: int) -> Data:
    """Noise over one fixed pattern a class: costs nothing to load, and can be learnt."""
    drawn = torch.Generator().manual_seed(seed)
    patterns = torch.randint(0, 256, (_SYNTHETIC_CLASSES, 3, 8, 8), generator=drawn)
    parts = []
    for count in (_SYNTHETIC_IMAGES, _SYNTHETIC_IMAGES // 4):
        labels = torch.randint(0, _SYNTHETIC_CLASSES, (count,), generator=drawn)
        coarse = patterns[labels] // 2
        coarse += torch.randint(0, 128, coarse.shape, generator=drawn)
        images = nn.functional.interpolate(coarse.to(torch.uint8), (side, side), mode="nearest")
        parts.append(Images(images, labels))
    return _split(*parts, classes=_SYNTHETIC_CLASSES)


def _downloadable(name: str, roots: list[Path], *, download: bool) -> Data:
    from torchvision import datasets  # noqa: PLC0415 - costs a second, needed here only

    maker = {"mnist": datasets.MNIST, "cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}
    for root in roots:
        try:
            train, test = maker[name](root, train=True), maker[name](root, train=False)
        except RuntimeError:  # torchvision's word for "not there, or not whole"
            continue
        return _split(_bytes_of(train), _bytes_of(test), classes=len(train.classes))
    if download:
        try:
            train = maker[name](roots[0], train=True, download=True)
            test = maker[name](roots[0], train=False, download=True)
        except (OSError, RuntimeError) as error:
            raise DataError(f"{name} could not be downloaded to {roots[0]}: {error}") from error
        return _split(_bytes_of(train), _bytes_of(test), classes=len(train.classes))
    looked = ", ".join(str(root.absolute()) for root in roots)
    raise DataError(
        f"{name} not found: looked in {looked}. Give --data-dir (torchvision's layout), or "
        "--download to fetch it; --dataset digits or synthetic need no download"
    )


def _bytes_of(dataset: "VisionDataset") -> Images:
    images = torch.as_tensor(dataset.data)
    labels = torch.as_tensor(dataset.targets)
    # MNIST is [N, 28, 28], CIFAR [N, 32, 32, 3].
    return Images(images.unsqueeze(1) if images.dim() == 3 else images.permute(0, 3, 1, 2), labels)


def _imagenet(roots: list[Path], side: int) -> Data:
    for root in roots:
        for folder in (root, root / "imagenet"):
            if (folder / "train").is_dir() and (folder / "val").is_dir():
                return _imagenet_folder(folder, side)
    looked = ", ".join(str(root.absolute()) for root in roots)
    raise DataError(
        f"imagenet not found: looked in {looked} for `train` and `val` (or `imagenet/train` and "
        "`imagenet/val`) with a folder a class. It must be fetched by hand from image-net.org; "
        "give its place as --data-dir"
    )


def _imagenet_folder(folder: Path, side: int) -> Data:
    try:
        train = FolderImages(folder / "train", side, augment=True)
        test = FolderImages(folder / "val", side, augment=False)
    except FileNotFoundError as error:  # a class folder without images
        raise DataError(f"{folder} is not a folder of images: {error}") from error
    if train.classes != test.classes:
        raise DataError(f"{folder}: train has {train.classes} classes, val {test.classes}")
    return _split(train, test, classes=train.classes)


def _split(train: Images | FolderImages, test: Images | FolderImages, *, classes: int) -> Data:
    return Data(train, len(train), test, len(test), classes)


def _stdlib_text() -> Tensor:
    """The installed Python's own library, module after module, up to 2 MiB."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= _TEXT_BYTES:
            break
    if not text:
        raise DataError("this Python was installed without the sources of its library")
    return torch.frombuffer(text[:_TEXT_BYTES], dtype=torch.uint8)


def _synthetic_text(seed: int) -> Tensor:
    """Words of a made-up vocabulary in random order: learnable, and different for each seed."""
    drawn = torch.Generator().manual_seed(seed)
    words = torch.randint(97, 123, (64, 8), generator=drawn, dtype=torch.uint8)
    words[:, -1] = 32
    return words[torch.randint(0, len(words), (1 << 15,), generator=drawn)].flatten()
