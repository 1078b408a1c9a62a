"""Compare classifiers in float32 and in int8 on their evaluation images: python tools/int8_accuracy.py runs/cifar10."""

import argparse
from typing import Any

import torch

import inlinevit
from inlinevit.report import Table, markdown_table
from inlinevit.tasks.classification.dataset import UnreadableCounter, drop_unreadable
from inlinevit.tasks.classification.task import Classification

COLUMNS = ("run", "images", "top-1 % float32", "top-1 % int8", "change", "other predictions %", "mean cosine", "lowest")


def main() -> None:
    """Evaluate the runs and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", help="folders of finished runs of classification")
    rows = [compare(run) for run in parser.parse_args().runs]
    print(markdown_table(Table(COLUMNS, rows, "Accuracy in int8")))


def compare(run: str) -> tuple[str, ...]:
    """Return the row of a run. Both models get the same batches of all its evaluation images."""
    predictor: Any = inlinevit.load(run, task="classification", device="cpu")
    models = [inlinevit.optimize_for_inference(predictor.model, compile=False, dtype=dtype) for dtype in (None, "int8")]
    evaluator = predictor.make_evaluator(Classification.open_eval_data(predictor.config.data, None, None), None)
    loader, unreadable = evaluator.loader(0, 1), UnreadableCounter(evaluator.config.max_unreadable)
    right, cosines, changed = [0, 0], [], 0
    for images, labels in drop_unreadable(loader, unreadable, evaluator.labels):
        float32, int8 = (model(images) for model in models)
        guesses = [logits.argmax(dim=1) for logits in (float32, int8)]
        right = [count + int((guess == labels).sum()) for count, guess in zip(right, guesses, strict=True)]
        changed += int((guesses[0] != guesses[1]).sum())
        cosines.append(torch.cosine_similarity(float32, int8))
    cosine = torch.cat(cosines)
    before, after = (100 * count / len(cosine) for count in right)
    values = (f"{before:.2f}", f"{after:.2f}", f"{after - before:+.2f}", f"{100 * changed / len(cosine):.2f}")
    return run, str(len(cosine)), *values, f"{cosine.mean():.6f}", f"{cosine.min():.4f}"


if __name__ == "__main__":
    main()
