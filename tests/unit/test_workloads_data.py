"""Datasets: real ones read as they are, wrong places named, batches that can be skipped."""

import pickle
import struct
from hashlib import md5
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch.utils.data import DistributedSampler
from torchvision.datasets import CIFAR10

from workloads import data


def _idx(path: Path, magic: int, array: np.ndarray) -> None:
    """Write MNIST's own format."""
    path.parent.mkdir(parents=True, exist_ok=True)
    header = struct.pack(f">{1 + array.ndim}i", magic, *array.shape)
    path.write_bytes(header + array.astype(np.uint8).tobytes())


def test_digits_are_the_ones_of_scikit_learn() -> None:
    loaded = data.load_images("digits", side=32, seed=0)
    images, labels = (torch.cat(parts) for parts in zip(
        loaded.train[list(range(loaded.train_size))], loaded.test[list(range(loaded.test_size))],
        strict=True,
    ))  # fmt: skip
    theirs = load_digits()
    assert (loaded.train_size, loaded.test_size, loaded.classes) == (1437, 360, 10)
    ours = {(tuple((image.flatten() * 16 / 255).round().int().tolist()), int(label))
            for image, label in zip(images.float(), labels, strict=True)}  # fmt: skip
    assert ours == {
        (tuple(int(grey) for grey in image), int(label))
        for image, label in zip(theirs.data, theirs.target, strict=True)
    }


def test_mnist_is_read_where_torchvision_puts_it(hostile_dir: Path) -> None:
    drawn = np.random.default_rng(0)
    raw = hostile_dir / "MNIST" / "raw"
    for part, count in (("train", 6), ("t10k", 4)):
        _idx(raw / f"{part}-images-idx3-ubyte", 2051, drawn.integers(0, 256, (count, 28, 28)))
        _idx(raw / f"{part}-labels-idx1-ubyte", 2049, np.arange(count))
    loaded = data.load_images("mnist", side=32, seed=0, data_dir=hostile_dir)
    images, labels = loaded.train[[0, 5]]
    assert (loaded.train_size, loaded.test_size, loaded.classes) == (6, 4, 10)
    assert (images.shape, images.dtype) == ((2, 1, 28, 28), torch.uint8)
    assert labels.tolist() == [0, 5]


def test_cifar_images_become_channels_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # torchvision checks the published files' sums; ours are of the same format, with other sums.
    pixels = np.random.default_rng(0).integers(0, 256, (3, 3, 32, 32), dtype=np.uint8)
    batch = pickle.dumps({"data": pixels.reshape(3, -1), "labels": [1, 2, 3]})
    meta = pickle.dumps({"label_names": list("abcdefghij")})
    folder = tmp_path / CIFAR10.base_folder
    folder.mkdir()
    (folder / "batch").write_bytes(batch)
    (folder / "meta").write_bytes(meta)
    listed = [["batch", md5(batch).hexdigest()]]
    monkeypatch.setattr(CIFAR10, "train_list", listed)
    monkeypatch.setattr(CIFAR10, "test_list", listed)
    monkeypatch.setattr(CIFAR10, "meta", {
        "filename": "meta", "key": "label_names", "md5": md5(meta).hexdigest()})  # fmt: skip
    loaded = data.load_images("cifar10", side=32, seed=0, data_dir=tmp_path)
    images, labels = loaded.test[[2, 0]]
    assert torch.equal(images, torch.from_numpy(pixels[[2, 0]]))
    assert labels.tolist() == [3, 1]


def test_imagenet_is_a_folder_a_class(tmp_path: Path) -> None:
    for part in ("train", "val"):
        for number, name in enumerate(("cat", "dog")):
            folder = tmp_path / "imagenet" / part / name
            folder.mkdir(parents=True)
            Image.new("RGB", (70, 50), (200 * number, 0, 0)).save(folder / "one.jpeg")
    loaded = data.load_images("imagenet", side=32, seed=0, data_dir=tmp_path)
    images, labels = loaded.test[[0, 1]]
    assert (images.shape, images.dtype, labels.tolist()) == ((2, 3, 32, 32), torch.uint8, [0, 1])
    assert images[0].float().mean() < 5 < images[1, 0].float().mean()
    assert loaded.train[[1]][0].shape == (1, 3, 32, 32)


def test_an_empty_class_folder_is_told(tmp_path: Path) -> None:
    for part in ("train", "val"):
        (tmp_path / part / "cat").mkdir(parents=True)
    with pytest.raises(data.DataError, match="not a folder of images"):
        data.load_images("imagenet", side=32, seed=0, data_dir=tmp_path)


@pytest.mark.parametrize("name", ["mnist", "cifar10", "cifar100", "imagenet"])
def test_missing_data_is_told_with_the_places_and_the_remedy(name: str, tmp_path: Path) -> None:
    with pytest.raises(data.DataError) as error:
        data.load_images(name, side=32, seed=0, data_dir=tmp_path / "nothing here")
    assert str(tmp_path / "nothing here") in str(error.value)
    assert "--data-dir" in str(error.value)


def test_the_usual_places_are_searched_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLTUNE_DATA_DIR", "/shared/data")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert data.search_roots(None) == [
        Path("/shared/data"), Path("data"), tmp_path / "rltune" / "data"]  # fmt: skip
    assert data.search_roots(Path("/given")) == [Path("/given")]


def test_library_text_is_shifted_by_one_token() -> None:
    loaded = data.load_text("stdlib-text", length=40, seed=0, masked=False)
    inputs, targets = loaded.train[[0, 1]]
    assert torch.equal(inputs.flatten()[1:], targets.flatten()[:-1])
    assert b"import" in bytes(loaded.train[list(range(50))][0].flatten().tolist())
    assert loaded.test_size == 64


def test_masked_tokens_and_only_they_are_targets() -> None:
    loaded = data.load_text("synthetic", length=64, seed=3, masked=True)
    inputs, targets = loaded.train[list(range(100))]
    masked = inputs == data.MASK_TOKEN
    assert torch.equal(masked, targets != data.IGNORED)
    assert 0.13 < masked.float().mean() < 0.17
    again = loaded.train[list(range(100))][0]
    other = loaded.train[list(range(1, 101))][0]
    assert torch.equal(again, inputs)
    assert not torch.equal((other == data.MASK_TOKEN)[:99], masked[1:])


@pytest.mark.parametrize("seed", [0, 1])
def test_synthetic_images_follow_the_seed_and_can_be_told_apart(seed: int) -> None:
    first = data.load_images("synthetic", side=32, seed=seed)
    again = data.load_images("synthetic", side=32, seed=seed)
    other = data.load_images("synthetic", side=32, seed=seed + 2)
    images, labels = first.train[list(range(first.train_size))]
    assert torch.equal(images, again.train[list(range(first.train_size))][0])
    assert not torch.equal(images, other.train[list(range(first.train_size))][0])
    # The nearest mean image names the class of test images.
    means = torch.stack([images[labels == label].float().mean(0) for label in range(10)])
    tested, answers = first.test[list(range(first.test_size))]
    distances = (tested.float().unsqueeze(1) - means).flatten(2).square().sum(-1)
    assert (distances.argmin(1) == answers).float().mean() > 0.95


@pytest.mark.parametrize("channels", [1, 3])
def test_images_become_three_channels_of_the_models_size(channels: int) -> None:
    images = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1).expand(2, channels, 8, 8)
    made = data.ImageInput(32)(images)
    assert made.shape == (2, 3, 32, 32)
    assert made.amin(dim=(1, 2, 3)).tolist() == made.amax(dim=(1, 2, 3)).tolist() == [-1, 1]


def _batches(size: int, rank: int, world: int, epoch: int, start: int = 0) -> list[list[int]]:
    sampler: DistributedSampler[int] = DistributedSampler(
        torch.utils.data.TensorDataset(torch.arange(50)), world, rank, seed=5
    )
    sampler.set_epoch(epoch)
    made = data.Batches(sampler, size)
    made.start = start
    return list(made)


def test_batches_can_begin_anywhere_in_an_epoch() -> None:
    whole = _batches(8, 0, 1, epoch=3)
    assert len(whole) == 6
    assert _batches(8, 0, 1, epoch=3, start=4) == whole[4:]
    assert _batches(8, 0, 1, epoch=3, start=6) == []
    assert _batches(8, 0, 1, epoch=4) != whole


def test_ranks_share_each_batch_of_a_single_process() -> None:
    alone = _batches(8, 0, 1, epoch=0)
    shared = zip(_batches(4, 0, 2, epoch=0), _batches(4, 1, 2, epoch=0), strict=True)
    assert [sorted(a + b) for a, b in shared] == [sorted(batch) for batch in alone]


def test_a_data_set_smaller_than_a_batch_is_one_batch() -> None:
    assert [len(batch) for batch in _batches(64, 0, 1, epoch=0)] == [50]
