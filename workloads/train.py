"""Train a model for real, on the GPUs that are visible or on the CPU.

On one GPU, or on the CPU (smaller, see --scale):
    python -m workloads.train resnet50 --dataset cifar10 --data-dir /data --batch-size 64

On all GPUs of this machine, one process each (the ranks are started for you):
    python -m workloads.train resnet50 --dataset imagenet --mode ddp --amp

The same under torchrun, also over several machines:
    torchrun --nproc-per-node 2 -m workloads.train resnet50 --mode ddp

Without any data of your own: digits for images, the Python library's text for language models:
    python -m workloads.train opt-125m --steps 100
    python -m workloads.train facebook/opt-1.3b --task inference --batch-size 8

What it prints, its exit codes and its environment are described in docs/workloads.md.
"""

import gc
import os
import sys
from collections.abc import Sequence

from workloads import catalogue
from workloads.options import Exit, Mode, Options, Task, is_rank, parse
from workloads.progress import note


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code (`options.Exit`)."""
    words = sys.argv[1:] if argv is None else list(argv)
    try:
        options = parse(words)
    except catalogue.UsageError as error:
        note(f"error: {error}")
        return Exit.USAGE
    if options is None:
        for family, names in catalogue.families().items():
            sys.stdout.write(f"{family:12} {' '.join(names)}\n")
        return Exit.OK
    if options.mode is Mode.DDP and not is_rank(os.environ):
        return _launched(words, options)
    return _run(options)


def _launched(words: Sequence[str], options: Options) -> int:
    gc.disable()
    from workloads import launch  # noqa: PLC0415 - torch takes its seconds only when it is needed

    _settle_imports()
    return launch.launch(words, options)


def _run(options: Options) -> int:
    # The garbage collector would walk a hundred thousand new objects again and again while torch
    # is imported, and once more at exit: a third of the start, for nothing.
    gc.disable()
    from workloads import parallel, session  # noqa: PLC0415 - see above
    from workloads.checkpoint import CheckpointError  # noqa: PLC0415
    from workloads.data import DataError  # noqa: PLC0415

    opened: session.Session | None = None
    code = Exit.OK
    try:
        opened = session.open_session(options)
        if options.task is Task.INFERENCE:
            from workloads.inference import Inference  # noqa: PLC0415 - loads transformers

            run = Inference(opened).run
        else:
            from workloads.training import Trainer  # noqa: PLC0415

            run = Trainer(opened).run
        _settle_imports()
        run()
    except session.Stopped:
        code = Exit.SAVED
    except catalogue.UsageError as error:
        code = _told(error, Exit.USAGE)
    except DataError as error:
        code = _told(error, Exit.NO_DATA)
    except session.NotFiniteError as error:
        code = _told(error, Exit.NOT_FINITE)
    except CheckpointError as error:
        code = _told(error, Exit.CHECKPOINT)
    gc.enable()
    if opened is not None:
        opened.wish.forget()
        opened.reporter.close()
        parallel.leave(opened.world)
    return code


def _settle_imports() -> None:
    gc.freeze()
    gc.enable()


def _told(error: Exception, code: Exit) -> Exit:
    note(f"error: {error}")
    return code


if __name__ == "__main__":
    sys.exit(main())
