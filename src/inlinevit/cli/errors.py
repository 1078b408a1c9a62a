"""From exceptions to one sentence on stderr and an exit code."""

import errno
import os
import re
import sys
from argparse import ArgumentError
from typing import TextIO

from ..engine.errors import RunEnded, Stopped
from ..utils.extras import missing_extra
from ..utils.validation import did_you_mean

TRACEBACK = "INLINEVIT_TRACEBACK"
# Names that other tools have for options, each with ours: the first that the command has is suggested.
SYNONYMS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("learning_rate", "lr", "base_lr", "init_lr"), ("optimizer.lr",)),
    **dict.fromkeys(("opt", "optim", "optimizer"), ("optimizer.name",)),
    **dict.fromkeys(("wd", "decay", "weight_decay"), ("optimizer.weight_decay",)),
    **dict.fromkeys(("clip", "grad_clip", "clip_grad_norm", "max_grad_norm"), ("optimizer.clip_grad",)),
    **dict.fromkeys(("layer_lr_decay", "lr_decay"), ("optimizer.layer_decay",)),
    **dict.fromkeys(("lr_mult", "lr_scale", "backbone_lr", "head_lr"), ("optimizer.lr_scales",)),
    **dict.fromkeys(("epoch", "epochs", "num_epochs", "max_epochs", "num_train_epochs"), ("schedule.epochs",)),
    **dict.fromkeys(("steps", "max_steps", "iters", "iterations"), ("schedule.steps",)),
    **dict.fromkeys(("warmup", "warmup_epochs", "warmup_steps"), ("schedule.warmup",)),
    **dict.fromkeys(("sched", "scheduler", "lr_scheduler", "schedule"), ("schedule.name",)),
    **dict.fromkeys(("b", "bs", "batch", "batch_size"), ("data.batch_size", "batch_size", "batches")),
    **dict.fromkeys(("j", "workers", "num_workers"), ("data.workers",)),
    **dict.fromkeys(("data", "dataset", "data_dir", "data_path", "train_dir", "images"), ("data.path", "data")),
    **dict.fromkeys(("val", "val_dir", "val_path", "test_dir"), ("data.eval_path",)),
    **dict.fromkeys(("m", "model", "model_name", "arch"), ("model.name", "model.backbone", "models")),
    **dict.fromkeys(("classes", "num_classes", "nb_classes", "num_labels"), ("model.num_classes",)),
    **dict.fromkeys(("img_size", "image_size", "input_size", "resolution"), ("model.img_size", "img_size", "sizes")),
    **dict.fromkeys(("pretrain", "pretrained"), ("model.pretrained",)),
    **dict.fromkeys(("ckpt", "weights", "checkpoint", "init_checkpoint"), ("model.checkpoint", "checkpoint")),
    **dict.fromkeys(("o", "out", "outdir", "output", "output_dir", "save_dir", "run"), ("run.output", "output")),
    **dict.fromkeys(("resume", "resume_from"), ("run.resume",)),
    **dict.fromkeys(("amp", "fp16", "bf16", "precision", "mixed_precision"), ("run.precision", "precision")),
    **dict.fromkeys(("accum", "grad_accum", "gradient_accumulation_steps"), ("run.grad_accum_steps",)),
    **dict.fromkeys(("ema", "model_ema"), ("run.ema_decay",)),
    **dict.fromkeys(("gpu", "gpus", "cuda", "cpu", "accelerator"), ("device",)),
    **dict.fromkeys(("k", "topk", "top_k"), ("top",)),
    **dict.fromkeys(("drop_path", "stochastic_depth"), ("model.drop_path_rate",)),
    **dict.fromkeys(("smoothing",), ("augment.label_smoothing",)),
    **dict.fromkeys(("aa", "autoaugment", "randaugment"), ("augment.auto_augment",)),
    **dict.fromkeys(("teacher",), ("distillation.teacher",)),
}


def report_error(error: Exception, options: list[str]) -> int:
    """Print what is wrong in one sentence and return the exit code; raise what is not the user's mistake again.

    Args:
        error: The exception.
        options: Options or commands that the user could have meant.
    """
    message = " ".join(str(error).split()).removesuffix(".")
    if isinstance(error, ArgumentError):
        if section := re.match(r'Parser key "(\w+)": Unable to load config \'(.*?)\' - ', message):
            # --SECTION FILE reads the fields of a whole section.
            message = f"--{section[1]} takes a YAML file of its fields, which {section[2]} is not"
        return print_error(f"error: {message}{hint(message, options)}", 2)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return print_error(f"error: no space left on the disk ({message}): free some and run the same command again", 1)
    if isinstance(error, OSError) and error.errno is not None:
        return print_error(f"error: {error.filename or 'a file'} cannot be used ({error.strerror}): check the path", 1)
    if isinstance(error, ValueError | OSError):
        return print_error(f"error: {message}", 1)
    if (extra := missing_extra(error)) is not None:
        return print_error(f"error: {message}: pip install 'inlinevit[{extra}]'", 1)
    if isinstance(error, RuntimeError) and (problem := lost_process(message)):
        return print_error(f"error: {problem}", 1)
    if isinstance(error, Stopped):
        return print_error(message, 128 + error.signal_number)
    if isinstance(error, RunEnded):
        return print_error(f"error: {message}", 1)
    raise error


def lost_process(message: str) -> str:
    """Return that another process has ended or does not answer, if that is what a message of torch says, or ""."""
    if re.search(r"Connection (closed|reset) by peer|Broken pipe", message):
        return "another process has ended before this one: see its message"
    if re.search(r"[Tt]imed out (waiting|after)|[Tt]imeout", message) and re.search(r"gloo|NCCL|[Ss]tore", message):
        return (
            "another process has not answered within the time-out: look for it on its machine, start the same command "
            "again to resume, or set a longer --parallel.timeout_minutes (--timeout_minutes for streamed images)"
        )
    return ""


def print_error(message: str, code: int) -> int:
    """Print a message to stderr, with the number of the process where there are several; return the code."""
    rank = os.environ.get("RANK", "0")
    print(message if rank == "0" else f"process {rank}: {message}", file=sys.stderr)
    return code


def hint(message: str, options: list[str]) -> str:
    """Return what the user could have meant, for a message of the parser; "" if the message has a remedy itself."""
    if re.search(r"did you mean|`inlinevit recipes", message):
        return ""
    if wrong := re.search(r"arguments: (?:.*? )??--?([A-Za-z][\w.-]*)|^--(\w+) takes a YAML file", message):
        near = suggest_option(wrong[1] or wrong[2], options, "--")
    elif wrong := re.search(r"[Oo]ption '([\w.-]+)", message):
        # In a recipe.
        near = suggest_option(wrong[1], options, "")
    elif wrong := re.search(r"invalid choice: '([\w.]+)", message):
        near = did_you_mean(wrong[1], options)
    elif wrong := re.search(r"Literal\[(.*)\]\. Got value: (\S+)", message):
        near = did_you_mean(wrong[2], re.findall(r"'(.*?)'", wrong[1]))
    else:
        near = ""
    return f": {near or 'see --help'}"


def suggest_option(wrong: str, options: list[str], prefix: str) -> str:
    """Return the option that was meant by a wrong one: a synonym, one of the same name in a section, a similar one.

    Args:
        wrong: As the user has written it, without leading dashes.
        options: The options of the command.
        prefix: What to print before the suggestion.
    """
    word = wrong.lower().replace("-", "_")
    last = word.rpartition(".")[2]
    same = [option for option in options if option.rpartition(".")[2] == last]
    meant = [word, *SYNONYMS.get(last, ()), *(same if len(same) == 1 else ())]
    # Sections are options, too; their names alone are never meant.
    known = [option for option in options if not any(other.startswith(f"{option}.") for other in options)]
    near = next((option for option in meant if option in known), None)
    return f"did you mean {prefix}{near}?" if near else did_you_mean(word, known).replace("mean ", f"mean {prefix}")


def show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print a warning as one line."""
    print(f"warning: {message}", file=sys.stderr)
