"""Images of any size through a model as a whole, in bounded memory."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..models._inline_vit import InLineViT
from ..parallel.collectives import SequenceGroup, all_reduce
from .attention_pass import AttentionPass
from .checkpoint import Checkpoint, Position, fingerprint_of
from .decoders import SegmentationNetwork
from .embed import embed_rows
from .mask import stage_masks
from .model_checks import check_model
from .passes import ConvMlpPass, Pass
from .plan import MemoryPlan, StepSize, make_plan, parse_bytes
from .run_pass import hide_background, run_pass
from .shards import FirstProcessSink, ShardedTokenMap, agree, sequence_group
from .sink import MapSink
from .source import ImageSource, TensorSource, check_rows, make_source
from .stage import StreamedStage, embed_work, is_reduced, stage_work
from .token_map import FileTokenMap, MemoryTokenMap, TokenMap


def stream(
    model: nn.Module,
    image: Tensor | ImageSource,
    *,
    memory: str | int = "2GB",
    spill: str | Path | None = None,
    mask: Tensor | None = None,
    features: Mapping[str, MapSink] | None = None,
    chunk_rows: int | None = None,
    progress: Callable[[float], None] | None = None,
    resume: str | Path | None = None,
    group: dist.ProcessGroup | DeviceMesh | None = None,
) -> Tensor:
    """Compute a model for one image of any size in bounded memory: the result of the plain forward pass.

    Tokens are computed by rows, all of them layer by layer. Attention that summarizes keys and values (InLine attention
    and linear ones) takes one pass per layer over the tokens, in which the summary for the next layer is made, too.
    Softmax attention within windows or stripes needs no summary, or the keys and values of all tokens. The result
    differs from the plain forward pass by rounding only.

    With a mask, background is treated as padding, in every layer:

    - background tokens are no keys, are in no mean (of attention, of the local residual, of the pooling), and their
      values are zero for the convolutions of the values (local residual, LePE) and in MLPs with a convolution;
    - they are zero for the downsampling of the next stage, and in the maps that are delivered;
    - a token of a later stage is background if its whole cell is.

    The pixels that a real token is made of are taken as they are. So the result depends on real tokens only.

    Args:
        model: A model of inlinevit in evaluation mode, float32 on the CPU; also one of `optimize_for_inference`.
        image: Normalised, (1, channels, height, width), or an ImageSource.
        memory: Bytes that streaming may use, weights not included, such as "2GB". The peak of the process is larger by
            at most plan.OVERHEAD.
        spill: A folder for tokens that do not fit into memory. Files in it have no name, and vanish however the process
            ends. By default, tokens have to fit.
        mask: Which pixels, or tokens of the first stage, are real, (height, width), True = real; all by default.
        features: Where maps go while they are computed, by name: "stages.1" (after a stage), "stages.0.blocks.3" (after
            a block), "norm" (the last map after the final norm).
        chunk_rows: Rows of tokens per chunk; by default as many as the memory allows and are useful.
        progress: Called with the fraction of the work that is done, from 0 to 1.
        resume: A folder for the state of this run, from which the same call continues after an interruption, with the
            same result. It is removed at the end. Maps that had been delivered are not delivered again. Tokens are in
            two files in this folder, also if they would fit into memory.
        group: Processes that share the image, each of which calls this function with the same arguments, such as
            `torch.distributed.group.WORLD`. A process reads and computes its rows of the image; `memory` is that of
            each process. Maps are delivered to the sinks of the first process only. Not with `resume`.

    Returns:
        What `model(image)` returns: logits (1, classes), in all processes.
    """
    processes = None if group is None else sequence_group(group)
    prepared: tuple[Streamer, MemoryPlan] | None = None
    error: Exception | None = None
    folder = None if spill is None else Path(spill)
    try:
        if chunk_rows is not None and chunk_rows < 1:
            raise ValueError(f"chunk_rows is {chunk_rows}: it should be at least 1")
        if processes is not None and resume is not None:
            raise ValueError("the state of several processes that share an image is not saved: leave out resume")
        kind = segmentation_streamer() if isinstance(model, SegmentationNetwork) else Streamer
        streamer = kind(model, image, mask, features or {}, progress, processes)
        plan = streamer.plan(
            parse_bytes(memory), can_spill=spill is not None, must_spill=resume is not None, rows=chunk_rows
        )
        if folder is not None and not folder.is_dir():
            raise ValueError(f"{folder} is not a folder: name one that exists to spill to")
        prepared = streamer, plan
    except Exception as problem:
        if processes is None:
            raise
        error = problem
    if processes is not None:
        agree(processes, error, {} if prepared is None else prepared[0].shared_facts(prepared[1]))
    assert prepared is not None
    streamer, plan = prepared
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        try:
            return streamer.run(plan, folder, None if resume is None else Path(resume))
        except BaseException:
            for sink in streamer.sinks.values():
                sink.abort()
            raise


class Streamer:
    """A model and an image; see stream."""

    # The map that comes after all stages.
    last_map = "norm"
    # Whether the maps of stages are needed after the next stage was made of them.
    keeps_stages = False

    def __init__(
        self,
        model: nn.Module,
        image: Tensor | ImageSource,
        mask: Tensor | None,
        features: Mapping[str, MapSink],
        progress: Callable[[float], None] | None,
        group: SequenceGroup | None = None,
    ) -> None:
        self.group, self.whole_model = group, model
        self.model = self.check_model(model)
        self.given_source = make_source(image, self.model.in_chans)
        self.source = self.prepare_source(self.given_source)
        width, height = self.source.size
        self.image_size = (height, width)
        self.stages: list[StreamedStage] = []
        size = self.image_size
        for index, stage in enumerate(self.model.stage_list()):
            self.stages.append(StreamedStage(stage, size, f"stages.{index}"))
            size = self.stages[-1].feat_size
        self.given_mask = mask = None if mask is None else mask.cpu()
        if mask is not None:
            if any(is_reduced(one) for stage in self.stages for one in stage.passes):
                raise ValueError("a mask cannot be used with reduced keys and values (sr_ratio): leave out the mask")
            grids = [stage.feat_size for stage in self.stages]
            masks = stage_masks(self.prepare_mask(mask), self.image_size, grids, self.model.reductions)
            for streamed, one in zip(self.stages, masks, strict=True):
                streamed.mask = one
        self.sinks = dict(features)
        names = [name for stage in self.stages for name in (*stage.block_names.values(), stage.name)]
        names.append(self.last_map)
        for name in self.sinks:
            if name not in names:
                raise ValueError(f"the model has no map {name!r}: choose from {', '.join(names)}")
        if group is not None:
            self.shard(group)
        self.delivered: tuple[str, ...] = ()
        self.progress = progress
        self.done = 0.0
        self.checkpoint: Checkpoint | None = None

    def check_model(self, model: nn.Module) -> InLineViT:
        """Return the network whose stages are streamed, or raise ValueError."""
        return check_model(model)

    def prepare_source(self, source: ImageSource) -> ImageSource:
        """Return the pixels that the network gets."""
        return source

    def prepare_mask(self, mask: Tensor) -> Tensor:
        """Return the mask of the pixels that the network gets, or of its tokens."""
        return mask

    def shard(self, group: SequenceGroup) -> None:
        """Share the rows of all maps between processes."""
        first = self.stages[0]
        units = -(-first.feat_size[0] // first.row_multiple)
        if units < group.size:
            what = "rows of tokens" if first.row_multiple == 1 else "rows of windows"
            raise ValueError(
                f"an image of {self.image_size[0]} rows has {units} {what}, which {group.size} processes cannot "
                f"share: use at most {units} processes"
            )
        for stage, previous in zip(self.stages, [None, *self.stages[:-1]], strict=True):
            stage.shard(group, previous)

    def shared_facts(self, plan: MemoryPlan) -> dict[str, object]:
        """Return what has to be the same in all processes that share the image."""
        return {
            "image size": self.image_size,
            "model or mask": fingerprint_of(self.model, ("mask", self.given_mask)),
            "choice of maps": sorted(self.sinks),
            "plan of memory": tuple(plan),
        }

    def plan(self, budget: int, *, can_spill: bool, must_spill: bool, rows: int | None) -> MemoryPlan:
        """Choose where maps are, and the rows per chunk; arguments as in make_plan."""
        return make_plan(
            [stage.size_for_plan() for stage in self.stages],
            budget,
            fixed=self.fixed_bytes(),
            can_spill=can_spill or must_spill,
            must_spill=must_spill,
            chunk_rows=rows,
            steps=self.step_sizes(),
            kept_bytes=self.kept_bytes(),
        )

    def fixed_bytes(self) -> int:
        """Return the memory that is used all the time."""
        return sum(stage.mask.numel() for stage in self.stages if stage.mask is not None)

    def step_sizes(self) -> list[StepSize]:
        """Return what the memory of the steps after all stages depends on."""
        return []

    def kept_bytes(self) -> int | None:
        """Return the size of the maps that exist at once, if more than one is kept."""
        return None

    def run(self, plan: MemoryPlan, spill: Path | None, resume: Path | None) -> Tensor:
        """Compute the model; see stream."""
        self.memory_plan, self.spill = plan, spill
        with ExitStack() as stack:
            if resume is not None:
                self.checkpoint = Checkpoint(resume, self.fingerprint())
                stack.callback(self.checkpoint.close)
            position = None
            if self.checkpoint is not None:
                position = self.checkpoint.load([stage.channels for stage in self.stages])
            first = 0 if position is None else position.stage
            if position is not None:
                self.restore(position)
            tokens: TokenMap | None = None
            prefix = torch.empty(0)
            try:
                for index in range(first, len(self.stages)):
                    if position is not None and index == first:
                        tokens, prefix = self.resume_stage(index, position)
                    else:
                        tokens, prefix = self.run_stage(index, tokens)
                    self.keep_stage(index, tokens)
                assert tokens is not None
                logits = self.finish(tokens, prefix)
            finally:
                if tokens is not None:
                    tokens.close()
                self.close()
            if self.checkpoint is not None:
                self.checkpoint.remove()
        self.report(1.0)
        return logits

    def run_stage(self, index: int, previous: TokenMap | None) -> tuple[TokenMap, Tensor]:
        """Embed the image, or the map of the stage before, and run all blocks.

        Returns:
            The map and the prefix tokens.
        """
        stage = self.stages[index]
        positions = stage.positions()
        prefix = stage.first_prefix(positions)
        tokens = self.new_map(index)
        try:
            summary = self.start_summary(stage.passes[0], prefix)
            rows_per_chunk = self.memory_plan.chunk_rows[index]
            if isinstance(previous, ShardedTokenMap):
                previous.borrow(stage.embed_borrowed)
            read = self.read_pixels if previous is None else map_reader(previous, frees=not self.keeps_stages)
            for top, rows in embed_rows(stage.geometry, read, rows_per_chunk, stage.start, stage.end):
                bottom = top + len(rows)
                if positions is not None:
                    rows = rows + positions.rows(top, bottom)
                mask = None if stage.mask is None else stage.mask[top:bottom]
                rows = hide_background(rows, mask)
                tokens.write(top, rows)
                if stage.passes[0].needs_summary:
                    stage.passes[0].add(summary, rows, mask, top)
                self.report(self.done + embed_work(stage, len(rows)) / self.total_work)
            if previous is not None and not self.keeps_stages:
                previous.close()
            self.save(tokens, index, 0, prefix)
            return self.run_passes(index, 0, tokens, prefix, summary)
        except BaseException:
            tokens.close()
            raise

    def start_summary(self, step: Pass, prefix: Tensor) -> Any:
        """Return a summary of the prefix tokens, if a pass needs one; of several processes, the first one has them."""
        summary = step.start_summary()
        if len(prefix) > 0 and step.needs_summary and (self.group is None or self.group.rank == 0):
            cast(AttentionPass, step).add_prefix(summary, prefix)
        return summary

    def read_pixels(self, top: int, bottom: int) -> Tensor:
        """Return rows of the image, (channels, rows, width)."""
        rows = self.source.rows(top, bottom)
        check_rows(rows, (self.source.channels, bottom - top, self.image_size[1]))
        return rows

    def resume_stage(self, index: int, position: Position) -> tuple[TokenMap, Tensor]:
        """Continue a stage after its last complete pass; returns as run_stage."""
        assert self.checkpoint is not None
        stage, prefix = self.stages[index], position.prefix
        self.delivered = position.delivered
        done = sum(sum(stage_work(one)) for one in self.stages[:index]) + sum(stage_work(stage)[: position.passes + 1])
        self.report(done / self.total_work)
        tokens = self.checkpoint.open_map(*stage.feat_size, stage.channels)
        try:
            if position.passes == len(stage.passes):
                self.deliver_stage(index, tokens)
                return tokens, prefix
            self.deliver_block(index, position.passes, tokens, prefix)
            step = stage.passes[position.passes]
            summary = self.start_summary(step, prefix)
            if step.needs_summary:
                for top, rows in self.chunks(index, tokens):
                    step.add(summary, rows, None if stage.mask is None else stage.mask[top : top + len(rows)], top)
            return self.run_passes(index, position.passes, tokens, prefix, summary)
        except BaseException:
            tokens.close()
            raise

    def run_passes(
        self, index: int, first: int, tokens: TokenMap, prefix: Tensor, summary: Any
    ) -> tuple[TokenMap, Tensor]:
        """Run the passes of a stage from `first` on; returns as run_stage.

        Args:
            index: The stage.
            first: The first pass.
            tokens: The map; it is closed if another one is returned.
            prefix: Prefix tokens.
            summary: That of the first pass, to which all tokens were added.
        """
        stage = self.stages[index]
        for number in range(first, len(stage.passes)):
            step, following = stage.passes[number], (*stage.passes, None)[number + 1]
            if self.group is not None and step.needs_summary:
                summary = step.reduce(summary, self.group)
            finished = step.finish(summary)
            new_prefix = step.apply_prefix(prefix, finished) if len(prefix) > 0 else prefix
            summary = None if following is None else self.start_summary(following, new_prefix)
            chunk_rows = self.memory_plan.chunk_rows[index]
            if self.needs_map(index, number):
                target = self.new_map(index) if self.checkpoint is not None else tokens
                if isinstance(tokens, ShardedTokenMap) and number in stage.borrowed:
                    tokens.borrow(stage.borrowed[number])
                try:
                    for top, rows, mask in run_pass(stage, step, finished, tokens, target, chunk_rows):
                        if following is not None and following.needs_summary:
                            following.add(summary, rows, mask, top)
                        work = stage_work(stage)[number + 1] * len(rows) / stage.feat_size[0]
                        self.report(self.done + work / self.total_work)
                finally:
                    if target is not tokens:
                        tokens.close()
                tokens = target
                if isinstance(tokens, ShardedTokenMap) and step.shift > 0:
                    tokens.give_back()
            prefix = new_prefix
            if self.needs_map(index, number):
                self.save(tokens, index, number + 1, prefix)
                self.deliver_block(index, number + 1, tokens, prefix)
        self.deliver_stage(index, tokens)
        return tokens, prefix

    def needs_map(self, index: int, number: int) -> bool:
        """Return whether the map after a pass is needed, or only the prefix tokens for the head."""
        stage = self.stages[index]
        last_block = len(stage.passes) - (2 if isinstance(stage.passes[-1], ConvMlpPass) else 1)
        is_last = index == len(self.stages) - 1 and number >= last_block
        wanted = {stage.name, stage.block_names[len(stage.passes)], "norm"} & self.sinks.keys()
        return not is_last or self.model.global_pool != "token" or bool(wanted)

    def restore(self, position: Position) -> None:
        """Open what an interrupted run has kept, besides the tokens of the stage that it was in."""

    def keep_stage(self, index: int, tokens: TokenMap) -> None:
        """Keep the map of a complete stage, if it is needed later."""

    def close(self) -> None:
        """Close maps that were kept."""

    def finish(self, tokens: TokenMap, prefix: Tensor) -> Tensor:
        """Apply the final norm and the head; deliver the last map."""
        model, index = self.model, len(self.stages) - 1
        stage = self.stages[index]
        is_wanted = "norm" in self.sinks and "norm" not in self.delivered
        if model.global_pool == "avg" or is_wanted:
            sums, sink = torch.zeros(stage.channels, dtype=torch.float64), None
            if is_wanted:
                sink = self.sink("norm", index)
                sink.begin((*stage.feat_size, stage.channels), model.reductions[index])
            for top, rows in self.chunks(index, tokens):
                mask = None if stage.mask is None else stage.mask[top : top + len(rows)]
                rows = hide_background(model.norm(rows), mask)
                sums += rows.sum(dim=(0, 1), dtype=torch.float64)
                if sink is not None:
                    sink.write_rows(top, rows)
            if sink is not None:
                sink.close()
                self.mark_delivered("norm", index, len(stage.passes), prefix)
            if self.group is not None:
                sums = all_reduce(sums, self.group)
        if model.global_pool == "token":
            pooled = model.norm(prefix)[:1]
        else:
            count = math.prod(stage.feat_size) if stage.mask is None else int(stage.mask.sum())
            pooled = (sums / count).float().unsqueeze(0)
        return model.head(model.fc_norm(pooled))

    def deliver_block(self, index: int, passes: int, tokens: TokenMap, prefix: Tensor) -> None:
        """Deliver the map of the block that is complete after so many passes, if it is wanted."""
        name = self.stages[index].block_names.get(passes, "")
        if self.deliver(name, index, tokens):
            self.mark_delivered(name, index, passes, prefix)

    def deliver_stage(self, index: int, tokens: TokenMap) -> None:
        """Deliver the map of a stage, if it is wanted."""
        # Delivered once more after an interruption before the next pass: the same rows.
        if self.deliver(self.stages[index].name, index, tokens):
            self.delivered += (self.stages[index].name,)

    def deliver(self, name: str, index: int, tokens: TokenMap) -> bool:
        """Deliver a map, if it is wanted and was not delivered before; return whether it was."""
        if name not in self.sinks or name in self.delivered:
            return False
        stage, sink = self.stages[index], self.sink(name, index)
        sink.begin((*stage.feat_size, stage.channels), self.model.reductions[index])
        for top, rows in self.chunks(index, tokens):
            sink.write_rows(top, rows)
        sink.close()
        return True

    def sink(self, name: str, index: int) -> MapSink:
        """Return where the rows of this process go, of a map of a stage."""
        stage, sink = self.stages[index], self.sinks[name]
        return sink if stage.rows is None else FirstProcessSink(sink, stage.rows, self.memory_plan.chunk_rows[index])

    def mark_delivered(self, name: str, index: int, passes: int, prefix: Tensor) -> None:
        """Note that a map was delivered."""
        self.delivered += (name,)
        if self.checkpoint is not None:
            self.checkpoint.save(Position(index, passes, prefix, self.delivered))

    def chunks(self, index: int, tokens: TokenMap) -> Iterator[tuple[int, Tensor]]:
        """Yield the first row and the rows of each chunk of a map."""
        stage, count = self.stages[index], self.memory_plan.chunk_rows[index]
        for top in range(stage.start, stage.end, count):
            yield top, tokens.read(top, min(top + count, stage.end))

    def new_map(self, index: int) -> TokenMap:
        """Return an empty map of a stage, in memory or in a file."""
        stage = self.stages[index]
        # At least one row: there are no files of nothing.
        shape = (max(1, stage.end - stage.start), stage.feat_size[1], stage.channels)
        if self.checkpoint is not None:
            return self.checkpoint.new_map(*shape)
        own: TokenMap
        own = MemoryTokenMap(*shape) if self.memory_plan.in_memory else FileTokenMap(*shape, folder=self.spill)
        return own if stage.rows is None else ShardedTokenMap(own, stage.rows)

    def save(self, tokens: TokenMap, index: int, passes: int, prefix: Tensor) -> None:
        """Make a complete map the one to resume from."""
        if self.checkpoint is not None:
            self.checkpoint.advance(cast(FileTokenMap, tokens), Position(index, passes, prefix, self.delivered))

    @property
    def total_work(self) -> float:
        """The work of this process for the image."""
        return sum(sum(stage_work(stage)) * stage.share for stage in self.stages)

    def report(self, done: float) -> None:
        """Report the fraction of the work that is done."""
        self.done = min(1.0, done)
        if self.progress is not None:
            self.progress(self.done)

    def fingerprint(self) -> str:
        """Return what identifies the run in a checkpoint."""
        source = self.given_source
        image: object = source.image if isinstance(source, TensorSource) else None
        if image is None:
            image = getattr(source, "fingerprint", None)
            if not isinstance(image, str):
                raise ValueError("this image source has no fingerprint, by which it is recognised: leave out resume")
        mask: object = self.given_mask
        model = self.whole_model
        return fingerprint_of(model, repr(model), self.image_size, ("image", image), ("mask", mask))


def segmentation_streamer() -> type[Streamer]:
    """Return the class that streams segmentation models, which is a Streamer itself."""
    from .segmenter import SegmentationStreamer

    return SegmentationStreamer


def map_reader(tokens: TokenMap, *, frees: bool) -> Callable[[int, int], Tensor]:
    """Return a function that gives rows of a map, (channels, rows, width), and may free the memory of rows before."""

    def read(top: int, bottom: int) -> Tensor:
        if frees:
            tokens.release(0, top)
        return tokens.read(top, bottom).permute(2, 0, 1)

    return read
