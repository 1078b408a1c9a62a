"""Images of any size through a model as a whole, in bounded memory, with the result of the plain forward pass."""

from .sink import HeadSink, MapSink, TensorSink
from .source import ImageSource, TensorSource
from .streamer import stream

__all__ = ["HeadSink", "ImageSource", "MapSink", "TensorSink", "TensorSource", "stream"]
