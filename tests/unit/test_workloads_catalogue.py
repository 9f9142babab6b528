"""Names, options and argument vectors of the workloads."""

import subprocess
import sys
from pathlib import Path

import pytest

from workloads import catalogue, families
from workloads.options import Mode, Task, parse


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("resnet50", "resnet50"),
        ("ResNet-50", "resnet50"),
        ("resnet_152", "resnet152"),
        (" densenet121 ", "densenet121"),
        ("mobilenetv2", "mobilenet_v2"),
        ("regnet_y_1_6gf", "regnet_y_1_6gf"),
        ("regnet-y-16gf", "regnet_y_16gf"),
        ("facebook/opt125m", "opt-125m"),
        ("facebook/opt-1.3b", "opt-1.3b"),
        ("facebook/opt1.3b", "opt-1.3b"),
        ("opt13b", "opt-13b"),
        ("facebook/opt2.7b", "opt-2.7b"),
        ("bigscience/bloom-3b", "bloom-3b"),
        ("bloom-1.1b", "bloom-1b1"),
        ("google-bert/bert-base-uncased", "bert-base"),
        ("openai-community/gpt2", "gpt2"),
        ("EleutherAI/gpt-j-6B", "gpt-j-6b"),
    ],
)
def test_names_as_people_write_them(written: str, name: str) -> None:
    assert catalogue.find(written).name == name


def test_every_name_finds_itself() -> None:
    assert [catalogue.find(name).name for name in catalogue.names()] == list(catalogue.names())
    assert sum(len(names) for names in catalogue.families().values()) == len(catalogue.names())


def test_a_spelling_that_could_mean_two_models_is_refused() -> None:
    with pytest.raises(catalogue.UsageError):
        catalogue.find("regnety16gf")


@pytest.mark.parametrize(
    ("written", "hint"),
    [
        ("resnet35", "did you mean 'resnet"),
        ("opt-124m", "did you mean 'opt-125m'"),
        ("somebody/opt-125m", "did you mean 'opt-125m'"),
        ("qqqqqq", "--list` names them"),
        ("", "--list` names them"),
        ("resnet50\n--lr", "unknown workload 'resnet50\\n--lr'"),
    ],
)
def test_unknown_names_get_a_hint(written: str, hint: str) -> None:
    with pytest.raises(catalogue.UsageError) as error:
        catalogue.find(written)
    assert hint in str(error.value)


def test_command_is_an_argument_vector_that_parses_back() -> None:
    options = ["--dataset", "cifar100", "--mode", "ddp", "--batch-size", "64", "--epochs", "6"]
    argv = catalogue.command("ResNet-34", options, python="/opt/py thon")
    assert argv == ("/opt/py thon", "-P", "-m", "workloads.train", "resnet34", *options)
    parsed = parse(argv[4:], {})
    assert parsed is not None
    assert (parsed.workload.name, parsed.mode, parsed.epochs) == ("resnet34", Mode.DDP, 6)


@pytest.mark.parametrize(
    ("model", "options", "word"),
    [
        ("resnet50", ["--datset", "cifar10"], "did you mean '--dataset'"),
        ("resnet50", ["--batchsize=4"], "did you mean '--batch-size'"),
        ("resnet50", ["--dataset", "cifar"], "did you mean 'cifar10'"),
        ("resnet50", ["--mode", "dpp"], "did you mean 'dp'"),
        ("resnet50", ["--dataset", "stdlib-text"], "resnet50 reads images"),
        ("opt-125m", ["--dataset", "cifar10"], "opt-125m reads text"),
        ("resnet50", ["--task", "inference"], "for language models"),
        ("opt-125m", ["--task", "inference", "--mode", "dp"], "--mode single or ddp"),
        ("resnet50", ["--seq-len", "64"], "for language models"),
        ("resnet50", ["--nproc", "2"], "--mode ddp"),
        ("resnet50", ["--download"], "mnist | cifar10 | cifar100"),
        ("resnet50", ["--batch-size", "0"], "not a whole number of 1 or more"),
        ("resnet50", ["--batch-size", "-4"], "--batch-size"),
        ("resnet50", ["--steps", "ten"], "'ten'"),
        ("resnet50", ["--steps", "9" * 30], "18 digits"),
        ("resnet50", ["--epochs", "1", "--steps", "1"], "not allowed with"),
        ("resnet50", ["--lr", "0"], "above 0"),
        ("resnet50", ["--lr", "nan"], "above 0"),
        ("resnet50", ["--scale", "2"], "up to 1"),
        ("resnet50", ["--progress-every", "inf"], "not a number"),
        ("resnet50", ["--dataset"], "expected one argument"),
        ("resnet50", ["resnet18"], "unknown argument 'resnet18'"),
        ("resnet50", ["--help"], "asks for a text"),
        ("resnet50", ["--list"], "asks for a text"),
    ],
)
def test_wrong_options_are_refused_before_anything_runs(
    model: str, options: list[str], word: str
) -> None:
    with pytest.raises(catalogue.UsageError) as error:
        catalogue.command(model, options)
    assert word in str(error.value)


def test_defaults_follow_the_kind_of_model() -> None:
    image, text = parse(["resnet50"], {}), parse(["opt-125m"], {})
    assert image is not None
    assert text is not None
    assert (image.dataset, image.batch_size, image.lr) == ("digits", 32, 0.05)
    assert (text.dataset, text.batch_size, text.lr) == ("stdlib-text", 8, 1e-3)
    assert (image.task, image.scale, image.checkpoint_dir) == (Task.TRAIN, None, None)


def test_environment_names_the_places_and_options_win() -> None:
    environ = {"RLTUNE_CHECKPOINT_DIR": "/kept", "RLTUNE_PROGRESS_FILE": "/told"}
    parsed = parse(["resnet50"], environ)
    assert parsed is not None
    assert (parsed.checkpoint_dir, parsed.progress_file) == (Path("/kept"), Path("/told"))
    parsed = parse(["resnet50", "--checkpoint-dir", "/mine"], environ)
    assert parsed is not None
    assert parsed.checkpoint_dir == Path("/mine")
    parsed = parse(["resnet50"], {"RLTUNE_CHECKPOINT_DIR": ""})
    assert parsed is not None
    assert parsed.checkpoint_dir is None


def test_importing_the_catalogue_loads_no_heavy_library() -> None:
    program = (
        "import sys, workloads.catalogue as c; c.command('opt-125m', ['--steps', '1'])\n"
        "print(sorted({'torch','torchvision','transformers','numpy','sklearn'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_all_sixteen_jobs_of_the_published_mix_have_a_name() -> None:
    mix = "resnet34 resnet101 densenet201 bigscience/bloom-3b facebook/opt2.7b facebook/opt125m "
    mix += "densenet169 facebook/opt1.3b resnet152 densenet121"
    kinds = {catalogue.find(name).kind for name in mix.split()}
    assert kinds == {families.Kind.VISION, families.Kind.LANGUAGE}
