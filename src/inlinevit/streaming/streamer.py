"""Images of any size through a model as a whole, in bounded memory."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..layers import SoftmaxAttention
from ..layers._chunks import has_hooks
from ..layers._inference_block import InferenceBlock
from ..layers.block import Block
from ..models._inline_vit import InLineViT, Stage, as_image
from ..utils.memory import FLOAT_BYTES
from .blocks import AttentionPass, Chunk, ConvMlpPass, Pass, make_passes
from .checkpoint import Checkpoint, Position, fingerprint_of
from .embed import EmbedGeometry, PositionRows, embed_rows
from .mask import stage_masks
from .plan import MemoryPlan, StageSize, make_plan, parse_bytes
from .sink import MapSink
from .source import ImageSource, TensorSource
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

    Returns:
        What `model(image)` returns: logits (1, classes).
    """
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f"chunk_rows is {chunk_rows}: it should be at least 1")
    streamer = Streamer(model, image, mask, features or {}, progress)
    plan = streamer.plan(
        parse_bytes(memory), can_spill=spill is not None, must_spill=resume is not None, rows=chunk_rows
    )
    folder = None if spill is None else Path(spill)
    if folder is not None and not folder.is_dir():
        raise ValueError(f"{folder} is not a folder: name one that exists to spill to")
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        try:
            return streamer.run(plan, folder, None if resume is None else Path(resume))
        except BaseException:
            for sink in streamer.sinks.values():
                sink.abort()
            raise


class StreamedStage:
    """A stage over a map of a given size.

    Args:
        stage: The stage.
        size: (height, width) of its input.
        name: Its name in the model.
    """

    def __init__(self, stage: Stage, size: tuple[int, int], name: str) -> None:
        self.stage, self.name = stage, name
        embed = stage.patch_embed if stage.patch_embed is not None else stage.downsample
        assert embed is not None
        self.geometry = EmbedGeometry(embed, size)
        self.feat_size = self.geometry.out_size
        self.channels = block_list(stage)[0].norm1.normalized_shape[0]
        self.passes: list[Pass] = []
        # The names of blocks by the number of passes after which they are complete.
        self.block_names: dict[int, str] = {}
        for index, block in enumerate(block_list(stage)):
            if type(block) not in (Block, InferenceBlock):
                raise ValueError(
                    f"{type(block).__name__} cannot be streamed: use a model of inlinevit as it was created"
                )
            self.passes += make_passes(block, self.feat_size, stage.num_prefix_tokens)
            self.block_names[len(self.passes)] = f"{name}.blocks.{index}"
        self.mask: Tensor | None = None

    @property
    def row_multiple(self) -> int:
        """Chunks have a multiple of this many rows."""
        return math.lcm(*(each for one in self.passes for each in (one.row_height, one.summary_height)))

    def size_for_plan(self) -> StageSize:
        """Return what the memory of the stage depends on."""
        # The input of a patch, which is read, padded and rearranged; the new tokens with their norm and positions.
        embedding = 4 * self.geometry.stride**2 * input_channels(self.geometry.module) + 4 * self.channels
        states = [state_bytes(one) for one in self.passes]
        return StageSize(
            *self.feat_size,
            self.channels,
            self.row_multiple,
            max(one.halo for one in self.passes),
            max(embedding, *(one.token_floats for one in self.passes)),
            # Those of a pass and of the next one.
            max(first + second for first, second in zip(states, [*states[1:], 0], strict=True)),
        )

    def positions(self) -> PositionRows | None:
        """Return the learned positions of the map, if there are any."""
        resample, pos_embed = self.stage.resample_pos_embed, self.stage.pos_embed
        if resample is None or pos_embed is None:
            return None
        return PositionRows(resample, pos_embed.detach(), self.feat_size)

    def first_prefix(self, positions: PositionRows | None) -> Tensor:
        """Return the prefix tokens before the first block, (prefix, channels)."""
        if self.stage.cls_token is None:
            return torch.empty(0, self.channels)
        prefix = self.stage.cls_token.detach()[0].expand(self.stage.num_prefix_tokens, -1)
        return prefix if positions is None else prefix + positions.prefix


class Streamer:
    """A model and an image; see stream."""

    def __init__(
        self,
        model: nn.Module,
        image: Tensor | ImageSource,
        mask: Tensor | None,
        features: Mapping[str, MapSink],
        progress: Callable[[float], None] | None,
    ) -> None:
        self.model = check_model(model)
        self.source = make_source(image, self.model.in_chans)
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
            masks = stage_masks(mask, self.image_size, grids, self.model.reductions)
            for streamed, one in zip(self.stages, masks, strict=True):
                streamed.mask = one
        self.sinks = dict(features)
        names = [name for stage in self.stages for name in (*stage.block_names.values(), stage.name)] + ["norm"]
        for name in self.sinks:
            if name not in names:
                raise ValueError(f"the model has no map {name!r}: choose from {', '.join(names)}")
        self.delivered: tuple[str, ...] = ()
        self.progress = progress
        self.done = 0.0
        self.checkpoint: Checkpoint | None = None

    def plan(self, budget: int, *, can_spill: bool, must_spill: bool, rows: int | None) -> MemoryPlan:
        """Choose where maps are, and the rows per chunk; arguments as in make_plan."""
        masks = sum(stage.mask.numel() for stage in self.stages if stage.mask is not None)
        sizes = [stage.size_for_plan() for stage in self.stages]
        can_spill = can_spill or must_spill
        return make_plan(sizes, budget, fixed=masks, can_spill=can_spill, must_spill=must_spill, chunk_rows=rows)

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
            tokens: TokenMap | None = None
            prefix = torch.empty(0)
            try:
                for index in range(first, len(self.stages)):
                    if position is not None and index == first:
                        tokens, prefix = self.resume_stage(index, position)
                    else:
                        tokens, prefix = self.run_stage(index, tokens)
                assert tokens is not None
                logits = self.classify(tokens, prefix)
            finally:
                if tokens is not None:
                    tokens.close()
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
            summary = start_summary(stage.passes[0], prefix)
            rows_per_chunk = self.memory_plan.chunk_rows[index]
            read = self.read_pixels if previous is None else map_reader(previous)
            for top, rows in embed_rows(stage.geometry, read, rows_per_chunk):
                bottom = top + len(rows)
                if positions is not None:
                    rows = rows + positions.rows(top, bottom)
                mask = None if stage.mask is None else stage.mask[top:bottom]
                rows = hide_background(rows, mask)
                tokens.write(top, rows)
                if stage.passes[0].needs_summary:
                    stage.passes[0].add(summary, rows, mask)
                self.report(self.done + embed_work(stage, len(rows)) / self.total_work)
            if previous is not None:
                previous.close()
            self.save(tokens, index, 0, prefix)
            return self.run_passes(index, 0, tokens, prefix, summary)
        except BaseException:
            tokens.close()
            raise

    def read_pixels(self, top: int, bottom: int) -> Tensor:
        """Return rows of the image, (channels, rows, width)."""
        rows = self.source.rows(top, bottom)
        expected = (self.source.channels, bottom - top, self.image_size[1])
        if tuple(rows.shape) != expected or rows.dtype != torch.float32:
            raise ValueError(
                f"the image source should give float32 rows of shape {expected}, but it gave {rows.dtype} of shape "
                f"{tuple(rows.shape)}"
            )
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
            summary = start_summary(step, prefix)
            if step.needs_summary:
                for top, rows in self.chunks(index, tokens):
                    step.add(summary, rows, None if stage.mask is None else stage.mask[top : top + len(rows)])
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
            finished = step.finish(summary)
            new_prefix = step.apply_prefix(prefix, finished) if len(prefix) > 0 else prefix
            summary = None if following is None else start_summary(following, new_prefix)
            if self.needs_map(index, number):
                target = self.new_map(index) if self.checkpoint is not None else tokens
                try:
                    for rows, mask in self.run_pass(index, step, finished, tokens, target):
                        if following is not None and following.needs_summary:
                            following.add(summary, rows, mask)
                        work = stage_work(stage)[number + 1] * len(rows) / stage.feat_size[0]
                        self.report(self.done + work / self.total_work)
                finally:
                    if target is not tokens:
                        tokens.close()
                tokens = target
            prefix = new_prefix
            if self.needs_map(index, number):
                self.save(tokens, index, number + 1, prefix)
                self.deliver_block(index, number + 1, tokens, prefix)
        self.deliver_stage(index, tokens)
        return tokens, prefix

    def run_pass(
        self, index: int, step: Pass, finished: Any, tokens: TokenMap, target: TokenMap
    ) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Replace the rows of a map, in place or in another map; yield new rows and which of their tokens are real."""
        stage, count = self.stages[index], self.memory_plan.chunk_rows[index]
        height = stage.feat_size[0]
        if step.shift > 0:
            yield from self.run_shifted_pass(index, step, finished, tokens, target)
            return
        above = torch.empty(0, *tokens.read(0, 0).shape[1:])
        for top in range(0, height, count):
            bottom = min(top + count, height)
            end = min(bottom + step.halo, height)
            rows = tokens.read(top, end)
            rows, below = rows[: bottom - top], rows[bottom - top :]
            mask = None if stage.mask is None else stage.mask[top - len(above) : end]
            # A copy of what is above the next chunk, because these rows are overwritten.
            last = torch.cat([above, rows[-step.halo :]])[-step.halo :] if step.halo > 0 else above
            new = self.apply(step, Chunk(rows, above, below, mask), finished)
            above = last
            target.write(top, new)
            yield new, None if stage.mask is None else stage.mask[top:bottom]

    def run_shifted_pass(
        self, index: int, step: Pass, finished: Any, tokens: TokenMap, target: TokenMap
    ) -> Iterator[tuple[Tensor, Tensor | None]]:
        """See run_pass, for a map that is rolled up: its last windows have the last and the first rows of the map."""
        stage, count = self.stages[index], self.memory_plan.chunk_rows[index]
        height, shift = stage.feat_size[0], step.shift
        padded = -(-height // step.row_height) * step.row_height
        for first in range(0, padded, count):
            top, bottom = first + shift, min(first + count, padded) + shift
            # Rows of the map, padding, and rows of the top of the map.
            middle = (min(top, height), min(bottom, height))
            padding = max(0, min(bottom, padded) - max(top, height))
            start = (max(0, top - padded), max(0, bottom - padded))
            rows = tokens.read(*middle)
            mask = None if stage.mask is None else stage.mask[slice(*middle)]
            if padding > 0 or start[1] > start[0]:
                empty = torch.zeros(padding, *rows.shape[1:])
                if mask is None and padding > 0:
                    mask = torch.ones(rows.shape[:2], dtype=torch.bool)
                first_rows = tokens.read(*start)
                rows = torch.cat([rows, empty, first_rows])
                if mask is not None:
                    first_mask = torch.ones(first_rows.shape[:2], dtype=torch.bool)
                    first_mask = first_mask if stage.mask is None else stage.mask[slice(*start)]
                    mask = torch.cat([mask, torch.zeros(empty.shape[:2], dtype=torch.bool), first_mask])
            new = self.apply(step, Chunk(rows, rows[:0], rows[:0], mask, start[1] - start[0]), finished)
            for begin, (start_row, end_row) in ((0, middle), (len(new) - (start[1] - start[0]), start)):
                if end_row > start_row:
                    part = new[begin : begin + end_row - start_row]
                    target.write(start_row, part)
                    yield part, None if stage.mask is None else stage.mask[start_row:end_row]

    def apply(self, step: Pass, chunk: Chunk, finished: Any) -> Tensor:
        """Return the new rows of a chunk; background is zero."""
        if chunk.mask is None:
            return step.apply(chunk, finished)
        mask = chunk.own_rows(chunk.mask)
        if not bool(mask.any()):
            return torch.zeros_like(chunk.tokens)
        return hide_background(step.apply(chunk, finished), mask)

    def needs_map(self, index: int, number: int) -> bool:
        """Return whether the map after a pass is needed, or only the prefix tokens for the head."""
        stage = self.stages[index]
        last_block = len(stage.passes) - (2 if isinstance(stage.passes[-1], ConvMlpPass) else 1)
        is_last = index == len(self.stages) - 1 and number >= last_block
        wanted = {stage.name, stage.block_names[len(stage.passes)], "norm"} & self.sinks.keys()
        return not is_last or self.model.global_pool != "token" or bool(wanted)

    def classify(self, tokens: TokenMap, prefix: Tensor) -> Tensor:
        """Apply the final norm and the head; deliver the last map."""
        model, index = self.model, len(self.stages) - 1
        stage = self.stages[index]
        is_wanted = "norm" in self.sinks and "norm" not in self.delivered
        if model.global_pool == "avg" or is_wanted:
            sums, sink = torch.zeros(stage.channels, dtype=torch.float64), self.sinks.get("norm")
            if is_wanted and sink is not None:
                sink.begin((*stage.feat_size, stage.channels), model.reductions[index])
            for top, rows in self.chunks(index, tokens):
                mask = None if stage.mask is None else stage.mask[top : top + len(rows)]
                rows = hide_background(model.norm(rows), mask)
                sums += rows.sum(dim=(0, 1), dtype=torch.float64)
                if is_wanted and sink is not None:
                    sink.write_rows(top, rows)
            if is_wanted and sink is not None:
                sink.close()
                self.mark_delivered("norm", index, len(stage.passes), prefix)
        if model.global_pool == "token":
            pooled = model.norm(prefix)[:1]
        else:
            count = math.prod(stage.feat_size) if stage.mask is None else int(stage.mask.sum())
            pooled = (sums / count).float().unsqueeze(0)
        return model.head(pooled)

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
        stage, sink = self.stages[index], self.sinks[name]
        sink.begin((*stage.feat_size, stage.channels), self.model.reductions[index])
        for top, rows in self.chunks(index, tokens):
            sink.write_rows(top, rows)
        sink.close()
        return True

    def mark_delivered(self, name: str, index: int, passes: int, prefix: Tensor) -> None:
        """Note that a map was delivered."""
        self.delivered += (name,)
        if self.checkpoint is not None:
            self.checkpoint.save(Position(index, passes, prefix, self.delivered))

    def chunks(self, index: int, tokens: TokenMap) -> Iterator[tuple[int, Tensor]]:
        """Yield the first row and the rows of each chunk of a map."""
        height, count = self.stages[index].feat_size[0], self.memory_plan.chunk_rows[index]
        for top in range(0, height, count):
            yield top, tokens.read(top, min(top + count, height))

    def new_map(self, index: int) -> TokenMap:
        """Return an empty map of a stage, in memory or in a file."""
        stage = self.stages[index]
        shape = (*stage.feat_size, stage.channels)
        if self.checkpoint is not None:
            return self.checkpoint.new_map(*shape)
        return MemoryTokenMap(*shape) if self.memory_plan.in_memory else FileTokenMap(*shape, folder=self.spill)

    def save(self, tokens: TokenMap, index: int, passes: int, prefix: Tensor) -> None:
        """Make a complete map the one to resume from."""
        if self.checkpoint is not None:
            self.checkpoint.advance(cast(FileTokenMap, tokens), Position(index, passes, prefix, self.delivered))

    @property
    def total_work(self) -> float:
        """The work for the whole image."""
        return sum(sum(stage_work(stage)) for stage in self.stages)

    def report(self, done: float) -> None:
        """Report the fraction of the work that is done."""
        self.done = min(1.0, done)
        if self.progress is not None:
            self.progress(self.done)

    def fingerprint(self) -> str:
        """Return what identifies the run in a checkpoint."""
        image: object = self.source.image if isinstance(self.source, TensorSource) else None
        if image is None:
            image = getattr(self.source, "fingerprint", None)
            if not isinstance(image, str):
                raise ValueError("this image source has no fingerprint, by which it is recognised: leave out resume")
        mask: object = self.given_mask
        return fingerprint_of(self.model, repr(self.model), self.image_size, ("image", image), ("mask", mask))


def check_model(model: nn.Module) -> InLineViT:
    """Return the model, or raise ValueError if it cannot be streamed."""
    if not isinstance(model, InLineViT):
        raise ValueError(
            f"{type(model).__name__} cannot be streamed: use a classification model of inlinevit, such as "
            'timm.create_model("inline_deit_tiny")'
        )
    if model.training:
        raise ValueError("the model is in training mode: call model.eval() first")
    if any(weight.dtype != torch.float32 or weight.device.type != "cpu" for weight in model.parameters()):
        raise ValueError("streaming computes in float32 on the CPU: call model.float().cpu() first")
    if has_hooks(model):
        raise ValueError("modules of the model have hooks, which streaming does not call: remove them")
    if model.global_pool == "":
        raise ValueError(
            "without pooling, the result is a map as large as the image: set global_pool to 'avg' or 'token', and ask "
            "for the map 'norm' in features"
        )
    return model


def make_source(image: Tensor | ImageSource, channels: int) -> ImageSource:
    """Return a source of the rows of an image, or raise ValueError if it does not fit the model."""
    source: ImageSource
    if isinstance(image, Tensor):
        as_image(image, channels)
        if image.shape[0] != 1:
            raise ValueError(
                f"one image is streamed at a time, but the batch has {image.shape[0]}: pass image[i : i + 1]"
            )
        source = TensorSource(image.detach().to("cpu", torch.float32))
    elif isinstance(image, ImageSource):
        source = image
    else:
        raise ValueError(
            f"expected a tensor (1, channels, height, width) or an ImageSource, but got {type(image).__name__}"
        )
    if source.channels != channels:
        raise ValueError(f"the image has {source.channels} channels, but the model takes {channels}")
    if min(source.size) < 1:
        raise ValueError(f"the image has {source.size[0]} × {source.size[1]} pixels: there is nothing to compute")
    return source


def block_list(stage: Stage) -> list[Block]:
    """Return the blocks of a stage."""
    return cast(list[Block], list(stage.blocks))


def start_summary(step: Pass, prefix: Tensor) -> Any:
    """Return a summary of the prefix tokens, if a pass needs one."""
    summary = step.start_summary()
    if len(prefix) > 0 and step.needs_summary:
        cast(AttentionPass, step).add(summary, prefix.unsqueeze(0), None, is_prefix=True)
    return summary


def hide_background(rows: Tensor, mask: Tensor | None) -> Tensor:
    """Return rows (rows, width, channels) with zeros where mask (rows, width) is False."""
    return rows if mask is None else rows.masked_fill(~mask.unsqueeze(2), 0.0)


def map_reader(tokens: TokenMap) -> Callable[[int, int], Tensor]:
    """Return a function that gives rows of a map, (channels, rows, width), and frees the memory of rows before them."""

    def read(top: int, bottom: int) -> Tensor:
        tokens.release(0, top)
        return tokens.read(top, bottom).permute(2, 0, 1)

    return read


def input_channels(module: nn.Module) -> int:
    """Return the channels of the input of a patch embedding or downsampling."""
    weight = next(parameter for parameter in module.parameters() if parameter.dim() > 1)
    return weight.shape[1] if weight.dim() == 4 else weight.shape[1] // 4


def is_reduced(step: Pass) -> bool:
    """Return whether the keys of a pass are those of a smaller map."""
    return isinstance(step, AttentionPass) and any(group.is_reduced for group in step.groups)


def state_bytes(step: Pass) -> int:
    """Return the size of the summary of a pass."""
    if not isinstance(step, AttentionPass):
        return 0
    total = 0
    for group in step.groups:
        if group.is_tall and isinstance(group.attn, SoftmaxAttention):
            count = 1 if group.is_reduced else -(-group.windows.map_width // group.windows.window_width)
            total += 2 * FLOAT_BYTES * group.num_keys * count * group.channels
        elif group.is_tall:
            count = -(-group.windows.map_width // group.windows.window_width)
            # In float64, merged from two.
            total += 3 * 2 * FLOAT_BYTES * count * group.channels * (group.attn.head_dim + 4)
    return total + 8 * FLOAT_BYTES * step.attn.dim**2


def embed_work(stage: StreamedStage, rows: int) -> float:
    """Return the work of embedding rows, in multiplications."""
    return float(rows * stage.feat_size[1] * stage.channels * stage.geometry.kernel**2 * 3)


def stage_work(stage: StreamedStage) -> list[float]:
    """Return the work of the embedding and of each pass of a stage, about, in multiplications."""
    tokens = float(math.prod(stage.feat_size))
    blocks = [12 * tokens * stage.channels**2 for _ in stage.passes]
    for index, step in enumerate(stage.passes):
        if isinstance(step, AttentionPass) and isinstance(step.attn, SoftmaxAttention):
            blocks[index] += sum(2 * tokens * keys_of(group) * group.channels for group in step.groups)
    return [embed_work(stage, stage.feat_size[0]), *blocks]


def keys_of(group: Any) -> int:
    """Return the number of keys that a query of a head group attends to."""
    return group.num_keys if group.is_tall else group.windows.window_height * group.windows.window_width
