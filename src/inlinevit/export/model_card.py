"""The model card of a published model: README.md with the metadata that the Hugging Face hub reads."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from .. import __version__
from ..engine.config import DEFAULT_EPOCHS

CARD = "README.md"
# By this, a folder that was written before is recognised.
MARK = "<!-- written by inlinevit hub -->"
# The hub's names of tasks.
PIPELINES = {
    "classification": "image-classification",
    "multilabel": "image-classification",
    "detection": "object-detection",
    "segmentation": "image-segmentation",
}
CLASSES_SHOWN = 20
# Settings of the recipe that a card shows; all of them are in config.yaml.
RECIPE = (
    ("optimizer", ("name", "lr", "lr_base_size", "weight_decay", "layer_decay", "lr_scales", "clip_grad")),
    ("schedule", ("name", "epochs", "steps", "warmup", "min_lr")),
    ("data", ("batch_size", "max_train_samples")),
    ("augment", ("auto_augment", "mixup", "cutmix", "random_erasing", "label_smoothing", "crop_size")),
    ("run", ("seed", "precision", "grad_accum_steps", "ema_decay")),
    ("distillation", ("teacher", "kind", "weight")),
)


@dataclass(frozen=True)
class Publication:
    """What a model card says.

    Attributes:
        config: The plain configuration of the run.
        task: The name of its task.
        command: The words before train, eval and predict.
        classes: Names of the classes, by index.
        parameters: Number of parameters.
        size: Side of the input; None = any size.
        metrics: Final metrics of the run, by name.
        license: The licence of the weights; None = none is stated.
        repository: USER/NAME on the hub; None = not known yet.
    """

    config: dict[str, Any]
    task: str
    command: str
    classes: Sequence[str]
    parameters: int
    size: int | None
    metrics: dict[str, float]
    license: str | None
    repository: str | None

    @property
    def architecture(self) -> str:
        """The name of the model or of its backbone."""
        model = self.config["model"]
        return str(model.get("name") or model.get("backbone"))

    @property
    def by_timm(self) -> bool:
        """Whether timm can make the model."""
        return self.task in ("classification", "multilabel")


def model_card(publication: Publication) -> str:
    """Return the text of a model card."""
    title = publication.repository or f"{publication.architecture} on {publication.config['data']['path']}"
    sections = [
        f"# {_plain(title)}",
        MARK,
        _about(publication),
        "## Use\n\n" + _use(publication),
        "## Metrics\n\n" + _metrics(publication),
        "## Data\n\n" + _data(publication),
        "## Recipe\n\n" + _recipe(publication),
        "## Licence\n\n" + _license(publication),
        "## Citation\n\nInLine attention: Han et al., *Bridging the Divide: Reconsidering Softmax and Linear "
        "Attention*, NeurIPS 2024, [arXiv:2412.06590](https://arxiv.org/abs/2412.06590).",
    ]
    return f"---\n{_front_matter(publication)}---\n\n" + "\n\n".join(sections) + "\n"


def _front_matter(publication: Publication) -> str:
    metadata: dict[str, Any] = {
        "library_name": "timm" if publication.by_timm else "inlinevit",
        "pipeline_tag": PIPELINES.get(publication.task),
        "tags": [tag for tag in ("timm" if publication.by_timm else None, "inlinevit", "linear-attention") if tag],
    }
    if publication.license is not None:
        metadata["license"] = publication.license
    return yaml.safe_dump(metadata, sort_keys=False)


def _about(publication: Publication) -> str:
    size = "" if publication.size is None else f", for images of {publication.size} × {publication.size} pixels"
    return (
        f"A model for {publication.task}: `{publication.architecture}` with {publication.parameters / 1e6:.2f} million "
        f"parameters and {len(publication.classes)} classes{size}. It was trained with inlinevit {__version__}."
    )


def _use(publication: Publication) -> str:
    where = f"hf-hub:{publication.repository}" if publication.repository else "local-dir:FOLDER"
    modules = publication.config["run"].get("attention_modules") or {}
    blocks = [
        f"```sh\n{publication.command} predict {where} photo.jpg\n```",
        f'```python\nimport inlinevit\n\nmodel = inlinevit.load("{where}")\nprint(model("photo.jpg").result)\n```',
    ]
    if publication.by_timm:
        blocks.append(
            "Or with timm alone; importing `inlinevit` registers the architecture:\n\n"
            f'```python\nimport inlinevit, timm\n\nmodel = timm.create_model("{where}", pretrained=True).eval()\n```'
        )
    if modules:
        named = ", ".join(f"`{_plain(name)}` of `{_plain(module)}`" for name, module in modules.items())
        blocks.append(
            f"It needs attentions that are not part of inlinevit: {named}; give their modules with `--import`."
        )
    return "\n\n".join(blocks)


def _metrics(publication: Publication) -> str:
    if not publication.metrics:
        return "The run has stored none for these weights; measure them with `eval`."
    rows = [f"| {_plain(name)} | {value:.4g} |" for name, value in publication.metrics.items()]
    return "On the validation data, by the run itself:\n\n| metric | value |\n| --- | --- |\n" + "\n".join(rows)


def _data(publication: Publication) -> str:
    data = publication.config["data"]
    facts = [f"Trained on `{_plain(data['path'])}`"]
    if data.get("max_train_samples"):
        facts.append(f"of which {data['max_train_samples']} images were used")
    shown = [_plain(name) for name in publication.classes[:CLASSES_SHOWN]]
    more = len(publication.classes) - len(shown)
    names = ", ".join(shown) + (f" and {more} more" if more else "")
    return f"{', '.join(facts)}. Classes: {names}."


def _recipe(publication: Publication) -> str:
    rows = []
    for section, names in RECIPE:
        values = dict(publication.config.get(section, {}))
        if section == "schedule" and values.get("steps") is None:
            values["epochs"] = values.get("epochs") or DEFAULT_EPOCHS
        if section == "distillation" and values.get("teacher") is None:
            continue
        rows += [
            f"| {section}.{name} | {_plain(values[name])} |" for name in names if values.get(name) not in (None, {})
        ]
    return "All settings are in `config.yaml`.\n\n| setting | value |\n| --- | --- |\n" + "\n".join(rows)


def _license(publication: Publication) -> str:
    if publication.license is not None:
        return f"The weights are published under {_plain(publication.license)}."
    return "No licence of the weights is stated: ask their authors before you use them for more than a trial."


def _plain(value: Any) -> str:
    """Text in one line that does not break out of a table, of code, or into HTML."""
    text = " ".join(str(value).split())[:200]
    return text.replace("|", "\\|").replace("`", "'").replace("<", "&lt;")
