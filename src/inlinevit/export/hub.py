"""`inlinevit hub`: a training run as a folder in timm's format for the Hugging Face hub, and its upload.

The folder is two things at once. For timm, it is config.json and model.safetensors. For inlinevit, it is a run without
checkpoints, config.yaml and the files of its task, so that a published model gives the results of its run.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import timm
import torch
import yaml
from timm.models import get_pretrained_cfg

from ..engine.config import to_plain
from ..engine.predictor import Predictor
from ..engine.runs import RUN_CHECKPOINTS, RUN_CONFIG, RUN_TASK, has_config, metadata_files, task_of
from ..models._pretrained import is_network_error
from ..models.factory import supported_arguments
from ..models.hub import LOCAL_DIR, TIMM_CONFIG, WEIGHTS, check_repository
from ..tasks import TASKS
from ..tasks.classification.predictor import CLASSES_JSON, ImagePredictor
from ..tasks.loading import load
from ..utils.atomic import atomic_folder, write_bytes
from ..utils.files import read_json
from ..utils.validation import require
from .model_card import CARD, MARK, Publication, model_card

RESULTS = "results.json"
# What tasks store beside their runs.
METADATA = (CLASSES_JSON, "categories.json", "labels.json")
# Entries of timm's pretrained_cfg that name the published weights of the architecture, or describe them.
OF_OTHER_WEIGHTS = (
    "architecture",
    "tag",
    "url",
    "file",
    "cache_file",
    "state_dict",
    "hf_hub_id",
    "hf_hub_filename",
    "source",
    "custom_load",
    "paper_ids",
    "paper_name",
    "description",
    "license",
    "notes",
    "origin_url",
)
# Largest difference of logits between the run and the folder, which are computed by the same code.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Upload:
    """Where a model is to be uploaded.

    Attributes:
        repository: USER/NAME.
        private: Whether only its owner sees it, if it is new.
    """

    repository: str
    private: bool = False


def publish(
    run: str, output: str, *, checkpoint: str | None = None, license: str | None = None, upload: Upload | None = None
) -> str | None:
    """Write a run as a folder in timm's format and, on request, upload it.

    Args:
        run: The folder of the training run, of any task.
        output: The folder to write: a new or empty one, or one that this has written before.
        checkpoint: "best", or a checkpoint of the run; None = the final weights.
        license: The licence of the weights, such as apache-2.0; None = the model card says that none is stated.
        upload: Where to upload it.

    Returns:
        The address of the uploaded model, or None.

    Raises:
        OSError: There is no such run, the folder cannot be written, or the upload has failed.
        ValueError: An argument makes no sense, or there is no token for the upload.
    """
    require(has_config(run), f"{run} is not the folder of a training run: name one with {RUN_CONFIG}")
    folder = check_hub_folder(output, run)
    if upload is not None:
        check_upload(upload)
    predictor = load(run, checkpoint=checkpoint, device="cpu")
    with atomic_folder(folder) as aside:
        repository = None if upload is None else upload.repository
        # Metrics of the run are those of its final weights.
        write_folder(predictor, Path(run), aside, license, repository, is_final=checkpoint is None)
        check_folder(predictor, aside)
    return None if upload is None else push(folder, upload)


def check_hub_folder(output: str, run: str) -> Path:
    """Return the path of the folder to write; refuse one that holds anything else."""
    require(bool(output.strip()), "--output is empty: name a folder for the published model")
    folder = Path(output)
    require(os.path.realpath(folder) != os.path.realpath(run), f"{output} is the run itself: name another --output")
    if folder.is_dir():
        is_ours = (folder / CARD).is_file() and MARK in (folder / CARD).read_text(errors="ignore")
        is_replaceable = is_ours and not (folder / RUN_CHECKPOINTS).exists()
        require(
            is_replaceable or not os.listdir(folder),
            f"{output} holds other files: name a new or empty folder with --output",
        )
    elif os.path.lexists(folder):
        raise ValueError(f"{output} is a file: name a folder with --output")
    return folder


def write_folder(
    predictor: Predictor[Any], run: Path, folder: Path, license: str | None, repository: str | None, *, is_final: bool
) -> None:
    """Write the files of a published model into a folder, which is made.

    Args:
        predictor: The model of the run.
        run: The folder of the run.
        folder: The folder to write.
        license: See publish().
        repository: USER/NAME, if the model is uploaded.
        is_final: Whether the weights are those that the stored metrics are of.
    """
    folder.mkdir()
    config = portable_config(to_plain(predictor.config))
    task = TASKS[task_of(type(predictor.config))]
    command = f"inlinevit {task.command}".strip()
    # Runs of other programs may not list their files.
    names = [name for name in metadata_files(run) or METADATA if (run / name).is_file() and name == Path(name).name]
    content = {name: read_json(run / name) for name in names}
    content[RUN_TASK] = {"name": task.name, "command": command, "files": names}
    results = read_json(run / RESULTS) if is_final and (run / RESULTS).is_file() else None
    if results is not None:
        content[RESULTS] = results
    if isinstance(predictor, ImagePredictor):
        content[TIMM_CONFIG] = timm_config(predictor, license)
    for name, value in content.items():
        write_bytes(folder / name, json.dumps(value, indent=2, ensure_ascii=False).encode())
    write_bytes(folder / RUN_CONFIG, yaml.safe_dump(config, sort_keys=False).encode())
    # Copied and not converted: these are the weights that the run was evaluated with.
    weights = {name: value.contiguous() for name, value in predictor.model.state_dict().items()}
    write_bytes(folder / WEIGHTS, safetensors.torch.save(weights, metadata={"format": "pt"}))
    publication = Publication(
        config=config,
        task=task.name,
        command=command,
        classes=list(predictor.classes),
        parameters=sum(parameter.numel() for parameter in predictor.model.parameters()),
        size=predictor.spec.size if isinstance(predictor, ImagePredictor) else None,
        metrics=metrics_of(results),
        license=license,
        repository=repository,
    )
    write_bytes(folder / CARD, model_card(publication).encode())


def metrics_of(results: Any) -> dict[str, float]:
    """The final metrics of a run."""
    metrics = results.get("metrics") if isinstance(results, dict) else None
    values = metrics.items() if isinstance(metrics, dict) else ()
    return {str(name): float(value) for name, value in values if isinstance(value, int | float)}


def portable_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of a run without the paths of the machine that it was trained on."""

    def last_part(value: Any) -> Any:
        is_path = isinstance(value, str) and (os.path.isabs(value) or value.startswith(("./", "../", "~")))
        return Path(value).name if is_path else value

    config = {section: dict(values) for section, values in config.items()}
    for name in ("path", "eval_path", "root", "labels"):
        if name in config["data"]:
            config["data"][name] = last_part(config["data"][name])
    config["run"].update(output="runs/published", resume="auto", trackers=[], device=None)
    config["model"].update(checkpoint=None, pretrained=False)
    if config.get("distillation", {}).get("checkpoint"):
        config["distillation"]["checkpoint"] = last_part(config["distillation"]["checkpoint"])
    return config


def timm_config(predictor: ImagePredictor, license: str | None) -> dict[str, Any]:
    """Return timm's description of a classifier, with which timm.create_model makes the same model and transform."""
    model, spec = predictor.config.model, predictor.spec
    made_for = get_pretrained_cfg(model.name)
    known = {} if made_for is None else made_for.to_dict(remove_null=True)
    cfg = {name: value for name, value in known.items() if name not in OF_OTHER_WEIGHTS}
    channels = len(spec.mean)
    cfg |= {
        "num_classes": predictor.num_classes,
        "input_size": [channels, spec.size, spec.size],
        "mean": list(spec.mean),
        "std": list(spec.std),
        "interpolation": spec.interpolation,
        "crop_pct": spec.crop_pct,
        "crop_mode": spec.crop_mode,
    }
    # Of another size than the published weights, and not known.
    cfg.pop("pool_size", None)
    for name in [name for name in cfg if name.startswith("test_")]:
        del cfg[name]
    if channels != 3:
        # timm would convert the first convolution, as if it were one for three channels.
        cfg["first_conv"] = None
    if license is not None:
        cfg["license"] = license
    taken = supported_arguments(model.name)
    arguments = {"in_chans": channels, "img_size": spec.size}
    content: dict[str, Any] = {
        "architecture": model.name.partition(".")[0],
        "num_classes": predictor.num_classes,
        "num_features": getattr(predictor.model, "num_features", None),
        "model_args": {**model.kwargs, **{name: value for name, value in arguments.items() if name in taken}},
        "pretrained_cfg": cfg,
    }
    if predictor.label_names is not None:
        content["label_names"] = predictor.label_names
        words = dict(zip(predictor.label_names, predictor.classes, strict=True))
        if any(name != word for name, word in words.items()):
            content["label_descriptions"] = words
    return content


@torch.no_grad()
def check_folder(predictor: Predictor[Any], folder: Path) -> None:
    """Refuse a folder from which inlinevit or timm do not load the model of the run."""
    again = load(folder, device="cpu")
    require(again.classes == predictor.classes, f"{folder} does not have the classes of the run: report this")
    expected, found = predictor.model.state_dict(), again.model.state_dict()
    same = expected.keys() == found.keys() and all(torch.equal(expected[name], found[name]) for name in expected)
    require(same, f"{folder} does not have the weights of the run: report this")
    if not isinstance(predictor, ImagePredictor):
        return
    made = timm.create_model(f"{LOCAL_DIR}{folder}", pretrained=True).eval()
    images = torch.randn(1, len(predictor.spec.mean), predictor.spec.size, predictor.spec.size)
    difference = (made(images) - predictor.model(images)).abs().max().item()
    require(
        difference <= TOLERANCE,
        f"timm makes another model of {folder} (logits differ by {difference:.0e}): report it",
    )


def check_upload(upload: Upload) -> None:
    """Refuse an upload that cannot succeed, before anything is computed: a wrong name, no token, or a wrong one."""
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError

    check_repository(upload.repository, "--push USER/NAME")
    token = get_token()
    require(bool(token), "there is no token for the hub: log in with `hf auth login`, or set HF_TOKEN")
    try:
        HfApi().whoami(token=token)
    except HfHubHTTPError as error:
        raise ValueError(f"the hub refuses the token ({_reason(error)}): log in with `hf auth login`") from None
    except Exception as error:
        if not is_network_error(error):
            raise
        raise OSError(f"the hub cannot be reached ({_reason(error)}): leave out --push, and upload later") from None


def push(folder: Path, upload: Upload) -> str:
    """Upload a folder, and return the address of the model."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi()
    try:
        api.create_repo(upload.repository, private=upload.private, exist_ok=True)
        # Only what was written: another process may have put files there.
        api.upload_folder(
            repo_id=upload.repository,
            folder_path=folder,
            allow_patterns=published_files(folder),
            commit_message="Upload model",
        )
    except Exception as error:
        if not (isinstance(error, HfHubHTTPError) or is_network_error(error)):
            raise
        raise OSError(
            f"{upload.repository} cannot be uploaded ({_reason(error)}): {folder} is complete, so check your rights "
            "and the connection and run the same command again"
        ) from None
    return f"{api.endpoint}/{upload.repository}"


def published_files(folder: Path) -> list[str]:
    """The names of the files of a published model."""
    names = (CARD, RUN_CONFIG, RUN_TASK, RESULTS, TIMM_CONFIG, WEIGHTS, *metadata_files(folder))
    return [name for name in names if (folder / name).is_file()]


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
