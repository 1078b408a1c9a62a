"""Published models by name: `hf-hub:USER/NAME` of the Hugging Face hub, and `local-dir:FOLDER`."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from ..utils.files import read_json
from ..utils.validation import require
from ._pretrained import TIMEOUT, PretrainedWeightsError, is_network_error

HF_HUB = "hf-hub:"
LOCAL_DIR = "local-dir:"
SOURCES = (HF_HUB, LOCAL_DIR)
# The only file of weights that is read out of a published model: safetensors hold no code.
WEIGHTS = "model.safetensors"
# timm's description of a model.
TIMM_CONFIG = "config.json"
# Files of a run that `inlinevit hub` publishes. Further ones are those that the last of them lists.
RUN_FILES = ("config.yaml", "results.json", "task.json")
MOST_FILES = 20


def is_source(name: str) -> bool:
    """Whether a name says where a model is published."""
    return name.startswith(SOURCES)


def fetch_source(name: str) -> str:
    """Return the folder of a published model; other names are returned as they are.

    Of a model on the hub, only its weights in safetensors and known JSON and YAML files are fetched, into the cache of
    huggingface_hub.

    Args:
        name: hf-hub:USER/NAME, hf-hub:USER/NAME@REVISION, local-dir:FOLDER, or anything else.

    Raises:
        FileNotFoundError: There is no such folder.
        PretrainedWeightsError: The hub cannot be reached, and the model is not in the cache.
        ValueError: There is no such model, or it holds no weights that are read.
    """
    if name.startswith(LOCAL_DIR):
        folder = Path(name.removeprefix(LOCAL_DIR))
        if not folder.is_dir():
            raise FileNotFoundError(f"no folder at {folder}: name the folder of a published model after {LOCAL_DIR}")
        return str(folder)
    return _fetch_from_hub(name.removeprefix(HF_HUB)) if name.startswith(HF_HUB) else name


def check_repository(repository: str, example: str) -> None:
    """Refuse a name that no repository of the hub can have."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repository)
    except HFValidationError:
        is_valid = False
    else:
        is_valid = repository.count("/") == 1
    require(is_valid, f"{repository!r:.100} is not the name of a model on the hub: write {example}")


def _fetch_from_hub(text: str) -> str:
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

    repository, _, revision = text.partition("@")
    check_repository(repository, f"{HF_HUB}USER/NAME, or {HF_HUB}USER/NAME@REVISION")
    is_offline = constants.HF_HUB_OFFLINE
    url = hf_hub_url(repository, WEIGHTS, revision=revision or None)
    reason = "HF_HUB_OFFLINE is set"
    try:
        if not is_offline:
            # Asked once: a download would be tried again and again, for most of a minute.
            with suppress(EntryNotFoundError):
                get_hf_file_metadata(url, timeout=TIMEOUT)
        return str(_download(repository, revision or None, is_offline=is_offline))
    except HfHubHTTPError as error:
        if (problem := _refusal(error, repository, revision)) is not None:
            raise ValueError(problem) from None
        reason = _in_a_line(error)
    except Exception as error:
        if isinstance(error, ValueError) or not (isinstance(error, EntryNotFoundError) or is_network_error(error)):
            raise
        if not isinstance(error, EntryNotFoundError):
            reason = _in_a_line(error)
    with suppress(EntryNotFoundError):
        return str(_download(repository, revision or None, is_offline=True))
    alternative = f"name a local copy of the model, {LOCAL_DIR}FOLDER"
    cached_as = f"copy {constants.HF_HUB_CACHE} from a machine that has it"
    raise PretrainedWeightsError(f"{HF_HUB}{text}", url, cached_as, reason, alternative) from None


def _download(repository: str, revision: str | None, *, is_offline: bool) -> Path:
    """Download the files of a model that are read, all of the same commit; returns their folder."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    folder: Path | None = None

    def fetch(name: str) -> bool:
        nonlocal folder
        commit = revision if folder is None else folder.name
        try:
            file = hf_hub_download(repository, name, revision=commit, local_files_only=is_offline)
        except EntryNotFoundError:
            return False
        folder = Path(file).parent
        return True

    for name in (*RUN_FILES, TIMM_CONFIG):
        fetch(name)
    names = _listed_files(folder) if folder is not None else []
    for name in names:
        fetch(name)
    if not fetch(WEIGHTS) and is_offline:
        raise EntryNotFoundError(WEIGHTS)
    require(
        folder is not None and (folder / WEIGHTS).is_file(),
        f"{HF_HUB}{repository} holds no {WEIGHTS}: other formats, which may hold code, are not read from the hub",
    )
    assert folder is not None
    return folder


def _listed_files(folder: Path) -> list[str]:
    """The JSON files that the description of a task lists; names of other folders are left out."""
    try:
        content: Any = read_json(folder / "task.json")
        names = content["files"]
    except (OSError, ValueError, TypeError, KeyError):
        return []
    known = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    return [name for name in known if name == Path(name).name and name.endswith(".json")][:MOST_FILES]


def _refusal(error: Exception, repository: str, revision: str) -> str | None:
    """One sentence on what the hub has answered; None if it has failed."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    where = f"{HF_HUB}{repository}"
    if isinstance(error, GatedRepoError):
        return f"{where} asks you to accept its terms first: do so on its page, then log in with `hf auth login`"
    if isinstance(error, RepositoryNotFoundError):
        return f"there is no model {where}, or it is private: check the name, or log in with `hf auth login`"
    if isinstance(error, RevisionNotFoundError):
        return f"{where} has no revision {revision!r:.60}: name a branch, a tag or a commit of it after @"
    return None


def _in_a_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
