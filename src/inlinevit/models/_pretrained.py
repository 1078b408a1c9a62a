"""Published weights: where they are downloaded from and cached, and what to do if they cannot be."""

import errno
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch.hub

# A server that does not answer within so many seconds cannot be reached.
TIMEOUT = 5.0
# Errors of the disk, not of the connection.
DISK_ERRORS = (errno.EACCES, errno.EDQUOT, errno.EFBIG, errno.ENOENT, errno.ENOSPC, errno.EPERM, errno.EROFS)
# The libraries that huggingface_hub connects with; their errors are not OSErrors.
HTTP_LIBRARIES = ("httpcore", "httpcore2", "httpx", "httpx2")
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pth", ".pt", ".npz")


class PretrainedWeightsError(OSError):
    """The published weights of a model cannot be downloaded; the message says what to do without a connection.

    Args:
        model: Name of the model.
        url: Address of the weights.
        cached_as: What to put where, so that nothing has to be downloaded.
        reason: Why they cannot be downloaded.
        alternative: How a local file is loaded.

    Attributes:
        model: Name of the model.
        url: Address of the weights.
    """

    def __init__(self, model: str, url: str, cached_as: str, reason: str, alternative: str) -> None:
        super().__init__(
            f"the published weights of {model} cannot be fetched from {url} ({reason}): {cached_as}, or {alternative}"
        )
        self.model, self.url = model, url
        self._arguments = model, url, cached_as, reason, alternative

    def __reduce__(self) -> Any:
        """Return how this is pickled, for processes that report it to others."""
        return type(self), self._arguments

    def with_alternative(self, alternative: str) -> "PretrainedWeightsError":
        """Return the same error with another way to load a local file."""
        return type(self)(*self._arguments[:-1], alternative)


@dataclass(frozen=True)
class Download:
    """Weights to download.

    Attributes:
        url: Their address.
        cached_as: What to put where, so that nothing has to be downloaded.
        is_cached: Whether they are there.
        is_on_hub: Whether they are on the Hugging Face hub.
    """

    url: str
    cached_as: str
    is_cached: bool
    is_on_hub: bool


def find_download(cfg: Any, cache_dir: str | Path | None = None) -> Download | None:
    """Return what timm downloads for a pretrained_cfg; None if it downloads nothing.

    Args:
        cfg: A PretrainedCfg of timm's, or None.
        cache_dir: The folder of the cache; None = that of torch.hub, or of huggingface_hub.
    """
    if cfg is None or cfg.state_dict or cfg.file or cfg.source == "local-dir":
        return None
    if cfg.hf_hub_id:
        from huggingface_hub import constants, hf_hub_url
        from huggingface_hub.file_download import repo_folder_name

        repository, _, revision = cfg.hf_hub_id.partition("@")
        name = cfg.hf_hub_filename or "model.safetensors"
        folder = Path(cache_dir or constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repository, repo_type="model")
        is_cached = any(file.suffix in WEIGHT_SUFFIXES for file in folder.glob("snapshots/*/*"))
        url = hf_hub_url(repository, name, revision=revision or None)
        return Download(url, f"copy {folder} with {name} from a machine that has it", is_cached, is_on_hub=True)
    if cfg.url:
        is_named = not isinstance(cfg.url, str)
        url = cfg.url[0] if is_named else cfg.url
        name = cfg.url[1] if is_named else os.path.basename(urlparse(url).path)
        file = Path(cache_dir or Path(torch.hub.get_dir()) / "checkpoints") / name
        return Download(url, f"save that file as {file}", file.exists(), is_on_hub=False)
    return None


@contextmanager
def downloading(model: str, cfg: Any, alternative: str, cache_dir: str | Path | None = None) -> Iterator[None]:
    """A context in which timm downloads weights: it does not wait long for a server that cannot be reached.

    Args:
        model: Name of the model, for messages.
        cfg: Its PretrainedCfg of timm's.
        alternative: How a local file is loaded, for messages.
        cache_dir: As for find_download().

    Raises:
        PretrainedWeightsError: They cannot be downloaded.
    """
    download = find_download(cfg, cache_dir)
    if download is None:
        yield
        return
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(TIMEOUT)
    try:
        if download.is_on_hub and not download.is_cached:
            _require_hub(download.url)
        yield
    except PretrainedWeightsError as error:
        raise error.with_alternative(alternative) from None
    except Exception as error:
        if not is_network_error(error):
            raise
        text = " ".join(str(getattr(error, "reason", None) or error).split())
        reason = re.sub(r"^\[Errno -?\d+\] ", "", text)[:200] or type(error).__name__
        # Not chained: the sentence says all, and the traceback of urllib does not help.
        raise PretrainedWeightsError(model, download.url, download.cached_as, reason, alternative) from None
    finally:
        socket.setdefaulttimeout(before)


def _require_hub(url: str) -> None:
    """Ask the Hugging Face hub for a file once; a download would be tried again and again, for most of a minute."""
    from huggingface_hub import get_hf_file_metadata
    from huggingface_hub.errors import EntryNotFoundError

    # If there is no such file, the hub has answered; timm knows other names of files.
    with suppress(EntryNotFoundError):
        get_hf_file_metadata(url, timeout=TIMEOUT)


def is_network_error(error: Exception) -> bool:
    """Whether an error is one of the connection or of the server."""
    if isinstance(error, OSError):
        return error.errno not in DISK_ERRORS
    return isinstance(error, HTTPException) or type(error).__module__.partition(".")[0] in HTTP_LIBRARIES
