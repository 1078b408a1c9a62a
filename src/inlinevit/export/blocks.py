"""Models as ONNX graphs by blocks: every kind of transformer block is recorded once, for all blocks of its kind.

torch.export computes with sizes as symbols. In a whole model, they are nested quotients of the image's sides, which are
simplified again for each operator: a model with windows takes many minutes. Here the model is recorded without its
blocks, and each kind of block alone, where the sides of the map are plain symbols; the blocks become functions of their
weights, which are then inserted into the graph of the model.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.export import Dim

from ..engine.exported import MOST_PIXELS
from ..layers import BaseAttention
from ..layers._chunks import has_hooks
from ..layers.block import Block
from .onnx import convert, finish, join_equal, quiet_conversion, simplify, to_onnx
from .program import RecordingError, export_program, exportable, record, symbols_of

# Of the placeholders in graphs; it is not in the result.
DOMAIN = "inlinevit"
# The example of a block: no two lengths are equal.
EXAMPLE_BATCH, EXAMPLE_MAP = 2, (17, 23)
# Attributes of modules that are compared by their content.
CONTENT = ("_parameters", "_buffers", "_modules")


@torch.library.custom_op("inlinevit::recorded_block", mutates_args=())
def recorded_block(maps: Tensor, index: int) -> Tensor:
    """Stand for the block of an index in a recorded graph; maps (batch, H, W, channels) to the same shape."""
    raise NotImplementedError("a placeholder in recorded graphs, which is not computed")


@recorded_block.register_fake
def _recorded_shape(maps: Tensor, index: int) -> Tensor:
    return maps.new_empty(maps.shape)


class Placeholder(nn.Module):
    """A block that is recorded elsewhere.

    Args:
        index: Its number in the model.
    """

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index

    def forward(self, x: Tensor, feat_size: tuple[int, int]) -> Tensor:
        """See Block.forward."""
        return recorded_block(x.unflatten(1, feat_size), self.index).flatten(1, 2)


class BlockOnMap(nn.Module):
    """A block as a function of one tensor, from which it gets the size of the map.

    Args:
        block: The block.
    """

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, maps: Tensor) -> Tensor:
        """Map (batch, H, W, channels) to the same shape."""
        feat_size = (maps.shape[1], maps.shape[2])
        return self.block(maps.flatten(1, 2), feat_size).unflatten(1, feat_size)


def convert_model(model: nn.Module, channels: int, outputs: Sequence[str], static: Sequence[int] | None = None) -> Any:
    """Convert a model to an onnx.ModelProto of standard operators.

    Args:
        model: In evaluation mode, from images (batch, channels, height, width) to a tensor or several.
        channels: Of the images.
        outputs: Names of its outputs.
        static: The shape of the input; None = any batch size, height and width.

    Raises:
        ValueError: It cannot be recorded for all sizes.
    """
    by_blocks = to_onnx_by_blocks(model, channels, outputs) if static is None else None
    return to_onnx(export_program(model, channels, static), outputs) if by_blocks is None else by_blocks


def to_onnx_by_blocks(model: nn.Module, channels: int, outputs: Sequence[str]) -> Any | None:
    """Convert a model for any batch size, height and width to an onnx.ModelProto of standard operators.

    Args:
        model: In evaluation mode, from images (batch, channels, height, width) to a tensor or several.
        channels: Of the images.
        outputs: Names of its outputs.

    Returns:
        The model, or None if it has no blocks without prefix tokens, or one that depends on the size of the map.
    """
    model = exportable(model)
    blocks = take_blocks(model)
    examples: list[Block] = []
    kinds = []
    for block in blocks.values():
        kind = next((place for place, known in enumerate(examples) if is_same(known, block)), len(examples))
        examples += [block] if kind == len(examples) else []
        kinds.append(kind)
    recorded = [one for one in map(_record, examples) if one is not None]
    if not blocks or len(recorded) < len(examples):
        return None
    translations = {torch.ops.inlinevit.recorded_block.default: _translation()}
    with quiet_conversion():
        converted = convert(export_program(model, channels), outputs, translations)
        sizes = sizes_of_maps(converted.model.graph)
        # The rules of the optimizer take long in large graphs: the blocks have been through them.
        simplify(converted)
        _insert(converted.model, list(blocks.items()), kinds, recorded, sizes)
        join_equal(converted)
    return finish(converted)


def take_blocks(model: nn.Module) -> dict[str, Block]:
    """Replace the blocks of a model by placeholders, and return them by their names, in order."""
    found: dict[str, Block] = {}
    for name, module in list(model.named_modules()):
        if type(module) is not Block or not isinstance(module.attn, BaseAttention) or has_hooks(module):
            continue
        if module.attn.num_prefix_tokens == 0:
            parent, _, key = name.rpartition(".")
            setattr(model.get_submodule(parent), key, Placeholder(len(found)))
            found[name] = module
    return found


def is_same(first: nn.Module, second: nn.Module) -> bool:
    """Whether two modules compute the same function of their parameters and buffers."""
    if type(first) is not type(second):
        return False
    for kind in ("_parameters", "_buffers"):
        tensors = vars(first)[kind], vars(second)[kind]
        if [*map(_form, tensors[0].items())] != [*map(_form, tensors[1].items())]:
            return False
    attributes = [{name: value for name, value in vars(one).items() if name not in CONTENT} for one in (first, second)]
    try:
        if attributes[0] != attributes[1]:
            return False
    # Tensors and arrays, which are not compared as a whole.
    except (RuntimeError, ValueError):
        return False
    children = [dict(one.named_children()) for one in (first, second)]
    return list(children[0]) == list(children[1]) and all(
        is_same(child, children[1][name]) for name, child in children[0].items()
    )


def _form(entry: tuple[str, Tensor | None]) -> tuple[Any, ...]:
    name, tensor = entry
    return (name,) if tensor is None else (name, tensor.shape, tensor.dtype)


class RecordedBlock:
    """A kind of block as a function in ONNX.

    Args:
        graph: From maps and weights to maps; constants are initial values.

    Attributes:
        graph: From maps, a tensor of the same shape, weights and constants to maps.
        weights: Names of the weights, in the order of the inputs.
        constants: Values of the constants, in the order of the inputs.
    """

    def __init__(self, graph: Any) -> None:
        import onnx_ir

        self.graph = graph
        self.weights = [value.name for value in graph.inputs[1:]]
        maps = graph.inputs[0]
        # Blocks of a stage have maps of the same size. If all get it from the same tensor, what they compute from it,
        # such as masks, is computed once.
        like = onnx_ir.Value(name="like", type=maps.type, shape=maps.shape)
        for node in graph:
            if node.op_type == "Shape" and node.inputs[0] is maps:
                node.replace_input_with(0, like)
        graph.inputs.insert(1, like)
        self.constants = []
        for name in list(graph.initializers):
            value = graph.initializers.pop(name)
            self.constants.append(value.const_value)
            value.const_value = None
            graph.inputs.append(value)


def _record(block: Block) -> RecordedBlock | None:
    """Record a block for maps of any size; None if it depends on the size."""
    module = BlockOnMap(block)
    example = torch.zeros(EXAMPLE_BATCH, *EXAMPLE_MAP, cast(BaseAttention, block.attn).dim)
    # As in export_program, maps have two rows and columns or more.
    sides = {place: Dim.AUTO(min=2, max=MOST_PIXELS) for place in (1, 2)}
    dynamic: Any = ({0: Dim.AUTO(min=1, max=MOST_PIXELS), **sides},)
    try:
        program = record(module, example, dynamic)
    except RecordingError:
        return None
    if len(symbols_of(program, (0, 1, 2))) < 3:
        return None
    own = own_tensors(module)
    with quiet_conversion():
        converted = convert(program, ["result"])
        graph = converted.model.graph
        # As inputs, weights are not folded into constants.
        for name in [name for name in graph.initializers if name in own]:
            value = graph.initializers.pop(name)
            value.const_value = None
            graph.inputs.append(value)
        simplify(converted)
    return RecordedBlock(converted.model.graph)


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a module by all of their names."""
    parameters, buffers = (get(remove_duplicate=False) for get in (module.named_parameters, module.named_buffers))
    return {name: tensor.detach() for name, tensor in (*parameters, *buffers)}


def sizes_of_maps(graph: Any) -> dict[int, str]:
    """Return the sizes of the maps of placeholders by their index, as expressions; only those that are known."""
    found = {}
    for node in graph:
        if node.domain == DOMAIN and node.inputs[0].shape is not None:
            lengths = [getattr(length, "value", length) for length in node.inputs[0].shape]
            if None not in lengths:
                found[node.attributes["index"].as_int()] = str(lengths)
    return found


def _translation() -> Any:
    """Return the function by which the exporter makes a node Block of a placeholder."""
    import onnxscript
    from onnx.defs import OpSchema

    schema = OpSchema(
        "Block",
        DOMAIN,
        1,
        inputs=[OpSchema.FormalParameter("maps", "T")],
        outputs=[OpSchema.FormalParameter("result", "T")],
        type_constraints=[("T", ["tensor(float)"], "")],
        attributes=[OpSchema.Attribute("index", OpSchema.AttrType.INT)],
    )
    operator = onnxscript.values.Op(onnxscript.values.Opset(DOMAIN, 1), "Block", schema)

    # The exporter reads the annotations: the index is an attribute.
    def translate(maps: onnxscript.FLOAT, index: int) -> Any:
        return operator(maps, index=index)

    return translate


def _insert(
    model: Any,
    blocks: Sequence[tuple[str, Block]],
    kinds: Sequence[int],
    recorded: Sequence[RecordedBlock],
    sizes: Mapping[int, str],
) -> None:
    """Replace the placeholders in an onnx_ir.Model by the nodes of their blocks.

    Args:
        model: The model.
        blocks: Names and blocks, by the index of their placeholders.
        kinds: The kind of each block.
        recorded: The functions of the kinds.
        sizes: See sizes_of_maps.
    """
    import onnx_ir
    from onnx_ir.passes.common import InlinePass

    graph = model.graph

    def register(name: str, tensor: Any) -> Any:
        # A block may be called twice.
        if name in graph.initializers:
            return graph.initializers[name]
        value = onnx_ir.Value(name=name, const_value=tensor, shape=tensor.shape, type=onnx_ir.TensorType(tensor.dtype))
        graph.register_initializer(value)
        return value

    constants = [
        [register(f"constant_{kind}_{place}", tensor) for place, tensor in enumerate(block.constants)]
        for kind, block in enumerate(recorded)
    ]
    for kind, block in enumerate(recorded):
        function = onnx_ir.Function(DOMAIN, f"Block_{kind}", graph=block.graph, attributes=[])
        model.functions[function.identifier()] = function
    # The first map of each size.
    firsts: dict[str, Any] = {}
    for node in [node for node in graph if node.domain == DOMAIN]:
        index, (maps,) = node.attributes["index"].as_int(), node.inputs
        (name, block), kind = blocks[index], kinds[index]
        tensors = own_tensors(BlockOnMap(block))
        weights = [
            register(f"{name}.{one.removeprefix('block.')}", onnx_ir.tensor(tensors[one].numpy()))
            for one in recorded[kind].weights
        ]
        like = firsts.setdefault(sizes[index], maps) if index in sizes else maps
        call = onnx_ir.Node(DOMAIN, f"Block_{kind}", [maps, like, *weights, *constants[kind]], num_outputs=1)
        onnx_ir.convenience.replace_nodes_and_values(graph, node, [node], [call], node.outputs, call.outputs)
    InlinePass()(model)
    model.opset_imports.pop(DOMAIN, None)
