"""Segmentation models over images of any size: the backbone by its stages, the decoder by steps over their maps."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from ..models._inline_vit import InLineViT
from ..parallel.collectives import SequenceGroup
from ..utils.memory import FLOAT_BYTES
from .checkpoint import Position
from .decoders import LEVELS, Gathered, SegmentationNetwork, Step, decoder_steps
from .model_checks import check_backbone
from .plan import StepSize
from .row_maps import RowMap, StoredRows
from .sink import MapSink
from .source import ImageSource, PaddedSource
from .streamer import Streamer
from .token_map import FileTokenMap, MemoryTokenMap, TokenMap

# Numbers per pixel and class that a sink makes of logits.
SINK_FLOATS = 3


class SegmentationStreamer(Streamer):
    """A segmentation model and an image; see stream."""

    last_map = "logits"
    keeps_stages = True

    def __init__(
        self,
        model: nn.Module,
        image: Tensor | ImageSource,
        mask: Tensor | None,
        features: Mapping[str, MapSink],
        progress: Callable[[float], None] | None,
        group: SequenceGroup | None = None,
    ) -> None:
        self.parts = cast(SegmentationNetwork, model).streamed_parts()
        if group is not None:
            raise ValueError("several processes cannot share the image of a segmentation model: use one process")
        super().__init__(model, image, mask, features, progress)
        self.size = (self.given_source.size[1], self.given_source.size[0])
        self.masks = {stage.feat_size: stage.mask for stage in self.stages if stage.mask is not None}
        # The maps that exist, by name; first those of the stages.
        self.maps: dict[str, TokenMap] = {}
        self.gathered: dict[str, list[Tensor]] = {}
        indices = list(cast(Sequence[int], self.parts.body.out_indices))
        self.level_of = {indices[level]: name for level, name in zip(self.parts.levels, LEVELS, strict=True)}
        self.shapes: dict[str, tuple[int, int, int]] = {
            name: (*self.stages[index].feat_size, self.stages[index].channels) for index, name in self.level_of.items()
        }
        # Each step with empty maps, for the plan.
        self.graphs: dict[str, RowMap] = {}
        for step in self.steps:
            stored = {name: StoredRows(self.shapes[name]) for name in step.uses if name in self.shapes}
            self.graphs[step.name] = graph = step.build(stored, {})
            if step.is_stored:
                self.shapes[step.name] = graph.shape

    def check_model(self, model: nn.Module) -> InLineViT:
        """See Streamer.check_model."""
        network, self.steps = check_segmenter(model)
        return network

    def prepare_source(self, source: ImageSource) -> ImageSource:
        """See Streamer.prepare_source: padded as in the forward pass of the model."""
        width, height = (length + self.parts.padding_of(length) for length in source.size)
        return PaddedSource(source, (width, height))

    def prepare_mask(self, mask: Tensor) -> Tensor:
        """See Streamer.prepare_mask: the padding is real where the edge of the image beside it is."""
        width, height = self.given_source.size
        stride = self.model.reductions[0]
        tokens = (-(-height // stride), -(-width // stride))
        for size, padded in (((height, width), self.image_size), (tokens, self.stages[0].feat_size)):
            if tuple(mask.shape) == size:
                rows, columns = (torch.arange(new).clamp(max=old - 1) for old, new in zip(size, padded, strict=True))
                return mask[rows][:, columns]
        listed = " × ".join(map(str, mask.shape))
        raise ValueError(
            f"mask has {listed} entries: it should have those of the image, {height} × {width}, or of its tokens, "
            f"{tokens[0]} × {tokens[1]}"
        )

    def fixed_bytes(self) -> int:
        """See Streamer.fixed_bytes: the logits, unless they go to a sink."""
        logits = 0 if self.last_map in self.sinks else FLOAT_BYTES * math.prod(self.size) * self.parts.num_classes
        return super().fixed_bytes() + logits

    def step_sizes(self) -> list[StepSize]:
        """See Streamer.step_sizes."""
        sizes = []
        for step in self.steps:
            graph = self.graphs[step.name]
            widest = max(one.row_floats() * one.height for one in graph.walk()) // graph.height
            extra = SINK_FLOATS * FLOAT_BYTES * graph.row_floats() if step is self.steps[-1] else 0
            sizes.append(StepSize(graph.height, max(1, widest), partial(step_bytes, graph, extra)))
        return sizes

    def kept_bytes(self) -> int | None:
        """See Streamer.kept_bytes."""
        sizes = {name: FLOAT_BYTES * math.prod(shape) for name, shape in self.shapes.items()}
        existing = set(LEVELS)
        most = sum(FLOAT_BYTES * math.prod(stage.feat_size) * stage.channels for stage in self.stages)
        for index, step in enumerate(self.steps):
            existing |= {step.name} if step.is_stored else set()
            most = max(most, sum(sizes[name] for name in existing))
            existing -= self.unused_after(index)
        return most

    def unused_after(self, index: int) -> set[str]:
        """Return the maps that no step after one of them reads."""
        later = {name for step in self.steps[index + 1 :] for name in step.uses}
        return self.shapes.keys() - later - {step.name for step in self.steps[index + 1 :]}

    def needs_map(self, index: int, number: int) -> bool:
        """See Streamer.needs_map."""
        return True

    @property
    def total_work(self) -> float:
        """See Streamer.total_work."""
        return super().total_work + sum(self.step_work(step) for step in self.steps)

    def step_work(self, step: Step) -> float:
        """Return the work of a step, in multiplications."""
        return sum(one.work() for one in self.graphs[step.name].walk())

    def restore(self, position: Position) -> None:
        """See Streamer.restore."""
        assert self.checkpoint is not None
        self.gathered = position.gathered
        done = [index for index, step in enumerate(self.steps) if step.name in self.gathered]
        gone = self.unused_after(max(done)) if done else set()
        complete = [self.level_of[index] for index in range(position.stage) if index in self.level_of]
        complete += [step.name for step in self.steps if step.is_stored and step.name in self.gathered]
        for name in complete:
            path = self.checkpoint.kept_path(name)
            if name in gone:
                continue
            if not path.is_file():
                raise ValueError(f"{path} is missing: remove {self.checkpoint.folder}, and start again")
            self.maps[name] = FileTokenMap(*self.shapes[name], path=path)

    def keep_stage(self, index: int, tokens: TokenMap) -> None:
        """See Streamer.keep_stage."""
        if index in self.level_of:
            self.maps[self.level_of[index]] = tokens
            if self.checkpoint is not None:
                self.checkpoint.keep(self.level_of[index])

    def finish(self, tokens: TokenMap, prefix: Tensor) -> Tensor:
        """Run the steps of the decoder; returns the logits (1, classes, height, width), unless they go to a sink."""
        for index, step in enumerate(self.steps[:-1]):
            if step.name not in self.gathered:
                self.run_step(index, step)
                if self.checkpoint is not None:
                    position = Position(len(self.stages) - 1, len(self.stages[-1].passes), prefix, self.delivered)
                    self.checkpoint.save(position._replace(gathered=self.gathered))
            else:
                self.report(self.done + self.step_work(step) / self.total_work)
            for name in self.unused_after(index) & self.maps.keys():
                self.maps.pop(name).close()
                if self.checkpoint is not None:
                    self.checkpoint.kept_path(name).unlink(missing_ok=True)
        return self.deliver_logits()

    def run_step(self, index: int, step: Step) -> None:
        """Compute the map of a step, store it, and gather what is needed of it."""
        graph = self.build(step)
        gather = None if step.gather is None else step.gather(graph.shape)
        mask = self.masks.get((graph.height, graph.width))
        stored: TokenMap | None = None
        if step.is_stored:
            stored = self.maps[step.name] = self.new_step_map(step)
        for top, rows in self.step_rows(index, step, graph):
            if stored is not None:
                stored.write(top, rows)
            if gather is not None:
                gather.add(top, rows, None if mask is None else mask[top : top + len(rows)])
        if isinstance(stored, FileTokenMap) and self.checkpoint is not None:
            stored.flush()
        self.gathered = {**self.gathered, step.name: [] if gather is None else gather.finish()}

    def deliver_logits(self) -> Tensor:
        """Compute the logits, and deliver them to their sink or return them."""
        step, (height, width) = self.steps[-1], self.size
        sink = self.sinks.get(self.last_map)
        logits = self.empty_logits() if sink is not None else torch.empty(1, self.parts.num_classes, height, width)
        if sink is not None:
            sink.begin((height, width, self.parts.num_classes), 1)
        for top, rows in self.step_rows(len(self.steps) - 1, step, self.build(step), height):
            if sink is not None:
                sink.write_rows(top, rows[:, :width])
            else:
                logits[0, :, top : top + len(rows)] = rows[:, :width].permute(2, 0, 1)
        if sink is not None:
            sink.close()
        return logits

    def empty_logits(self) -> Tensor:
        """Return what stands for logits that went to a sink."""
        return torch.empty(1, self.parts.num_classes, 0, 0)

    def build(self, step: Step) -> RowMap:
        """Return the map of a step over the maps that exist."""
        gathered: Gathered = self.gathered
        stored = {name: StoredRows(self.shapes[name], self.maps[name]) for name in step.uses if name in self.shapes}
        graph = step.build(stored, gathered)
        graph.set_masks(self.masks)
        return graph

    def step_rows(
        self, index: int, step: Step, graph: RowMap, height: int | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield the first row and the rows of each chunk of the map of a step, down to `height`."""
        reader, height = graph.open(), height or graph.height
        count = self.memory_plan.chunk_rows[len(self.stages) + index]
        work = self.step_work(step) / self.total_work / height
        for top in range(0, height, count):
            bottom = min(top + count, height)
            yield top, reader.read((top, bottom), bottom)
            self.report(self.done + work * (bottom - top))

    def new_step_map(self, step: Step) -> TokenMap:
        """Return an empty map of a step, in memory or in a file."""
        shape = self.shapes[step.name]
        if self.checkpoint is not None:
            path = self.checkpoint.kept_path(step.name)
            path.unlink(missing_ok=True)
            return FileTokenMap(*shape, path=path)
        return MemoryTokenMap(*shape) if self.memory_plan.in_memory else FileTokenMap(*shape, folder=self.spill)

    def close(self) -> None:
        """See Streamer.close."""
        for tokens in self.maps.values():
            tokens.close()
        self.maps = {}


def check_segmenter(model: nn.Module) -> tuple[InLineViT, list[Step]]:
    """Return the network of the backbone and the steps of the decoder, or raise ValueError for what is not streamed."""
    parts = cast(SegmentationNetwork, model).streamed_parts()
    return check_backbone(model, parts.body), decoder_steps(parts)


def step_bytes(graph: RowMap, extra: int, rows: int) -> int:
    """Return the memory that computing so many rows of a step takes, with `extra` bytes for each of them."""
    return graph.peak_bytes(rows) + extra * rows
