"""`inlinevit explore`: start the explorer, or write it to a folder."""

import errno
import socket
import sys
import threading
import webbrowser
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import uvicorn
from rich.console import Console

from ..data.images import display_name, find_images
from ..engine.outputs import check_output_folder
from ..utils.console import new_console
from ..utils.files import read_bytes
from ..utils.memory import GIGABYTE
from ..utils.validation import Range, check_value, require
from .explorer import Explorer
from .pictures import MOST_PIXELS, MOST_UPLOAD_BYTES, Sample, clean_name, read_picture
from .server import create_app
from .site import MOST_IMAGES, STATE, check_site, write_site
from .subjects import open_subjects

MOST_SAMPLES = 24


def explore_command(
    models: Sequence[str],
    *,
    images: Sequence[str] = (),
    static: str | None = None,
    pretrained: bool = False,
    checkpoint: str | None = None,
    img_size: int | None = None,
    device: str | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    browser: bool = True,
    max_pixels: int | None = None,
) -> None:
    """Start the explorer and serve it until it is interrupted, or write it; the arguments are those of the command."""
    check_value("port", port, int, Range(0, 65535))
    most = MOST_PIXELS if max_pixels is None else max_pixels
    check_value("max_pixels", most, int, Range(1, 2**40))
    require(bool(host.strip()), "host is empty: leave it out for 127.0.0.1")
    console = new_console(stderr=True, highlight=False, soft_wrap=True)
    if static is not None:
        require(bool(static.strip()), "--static is empty: name a folder")
        check_site(Path(static))
        check_output_folder(static, [STATE])
    # Before models are loaded, which takes seconds.
    listening = None if static is not None else listen(host, port)
    given = open_samples(images)
    subjects = open_subjects(models, pretrained=pretrained, checkpoint=checkpoint, img_size=img_size, device=device)
    for sample in given:
        content = sample.load()
        assert isinstance(content, bytes)
        read_picture(content, sample.title, [subject.predictor.spec for subject in subjects], most)
    explorer = Explorer(subjects, samples=given, max_pixels=most)
    # Fails here, and not in the page, if a model cannot be explored.
    explorer.open_sample(0)
    console.print(f"Models: {', '.join(subject.label for subject in subjects)}", markup=False)
    if listening is None:
        assert static is not None
        chosen = range(len(given)) if given else range(min(MOST_IMAGES, len(explorer.samples)))
        size = write_site(explorer, Path(static), chosen, console)
        console.print(
            f"{Path(static).resolve()}: {size / (GIGABYTE / 1000):.1f} MB. Serve it with any web server, such as"
        )
        console.print(f"python -m http.server --bind 127.0.0.1 --directory {static}", markup=False)
        return
    serve(explorer, listening, host, browser, console)


def open_samples(images: Sequence[str]) -> list[Sample]:
    """Return the pictures in files that the user names."""
    files = find_images(images)
    require(len(files) <= MOST_SAMPLES, f"{len(files)} images are too many to offer: name at most {MOST_SAMPLES}")
    samples = []
    for path, problem in files.items():
        name = display_name(path)
        require(not problem, f"{name} cannot be used ({problem})")
        size = Path(path).stat().st_size
        require(
            size <= MOST_UPLOAD_BYTES,
            f"{name} cannot be used (it has more than {MOST_UPLOAD_BYTES >> 20} MB): choose a smaller picture",
        )
        samples.append(Sample(clean_name(Path(name).name), partial(read_bytes, path)))
    return samples


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on a port; 0 = a free one."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise ValueError(f"host is {host!r}, which is no name or address of this machine: leave it out") from error
    listening = socket.socket(family, kind, protocol)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(address)
        listening.listen()
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            raise ValueError(f"port {port} is in use: choose another --port, or leave it out for a free one") from error
        raise ValueError(f"{host}:{port} cannot be listened on ({error.strerror}): choose another --port") from error
    return listening


def serve(explorer: Explorer, listening: socket.socket, host: str, browser: bool, console: Console) -> None:
    """Serve the page until the process is interrupted."""
    port = listening.getsockname()[1]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    address = f"http://{shown}:{port}/"
    config = uvicorn.Config(
        create_app(explorer, host=host),
        # Errors of the explorer are reported in the page; requests that an interrupt ends are no errors.
        log_level="critical",
        access_log=False,
        server_header=False,
        ws="none",
        lifespan="off",
        timeout_graceful_shutdown=1,
    )
    # On stdout, for scripts that start the explorer.
    print(address, flush=True)
    console.print("The explorer runs until you press Ctrl+C.")
    if browser:
        # The socket listens already: the page waits until the server answers.
        threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
    try:
        uvicorn.Server(config).run(sockets=[listening])
    except KeyboardInterrupt:
        # uvicorn has shut down, and raises the interrupt again.
        print("stopped", file=sys.stderr)
    finally:
        # Python waits for computations in other threads before it exits.
        explorer.close()
