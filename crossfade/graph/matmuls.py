"""Matrix products in whatever spelling a graph has, as einsum equations over the values that matter.

`products_of` a value gives every matmul that reads it, with the value itself as the first operand of the equation, one
letter for each of its dims. `product_before` a value gives the matmul that made it, with one letter or more for each of
its dims. Views, transposes and broadcasts in between are in the letters:

    [B, S, K] -> view [B*S, K] -> mm with [K, N] -> view [B, S, N]        "abc,cd->abd"
    the same on undecomposed graphs: linear with a weight of [N, K]       "abc,dc->abd"
    the weight's gradient, [B*S, K] transposed, times [B*S, N]            "abc,abd->cd"
"""

from __future__ import annotations

import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx

from crossfade.graph import layouts
from crossfade.graph.layouts import Layout, Piece, Size, Unreadable, same, same_shape
from crossfade.graph.matmul_forms import Form, form_of
from crossfade.graph.program import size_hint
from crossfade.graph.relayouts import Refusal, Spread, ancestors, laid_between, layout_of, spread
from crossfade.graph.text import render_type

OTHER_READER = "something else than a matmul reads it"
SIZE_ONLY = "only a size of it is asked for"
OTHER_MAKER = "something else than a matmul made it"
RETYPED = "its bytes are seen as another dtype"
APART = "the matmul takes its dims apart"


@dataclass(frozen=True)
class Product:
    """A matmul as an equation: `node` is `einsum(equation, operand, other) + bias`, viewed in `node`'s own shape.

    Where a shape is given, what it is of is reshaped to it first: operands have one dim for each letter, a bias and
    scales are broadcast (a scale against its operand, a bias against the result of shape `shape`). `scales` are those
    of the two operands. `letters` says which letters of the result each dim of `node` consists of, outermost first.
    `nodes` are the matmul and the views to or from it, which nothing may need any more.
    """

    node: fx.Node
    equation: str
    operand: fx.Node
    other: fx.Node
    other_shape: tuple[Size, ...] | None
    bias: fx.Node | None
    scales: tuple[fx.Node | None, fx.Node | None] | None
    dtype: torch.dtype
    shape: tuple[Size, ...]
    nodes: tuple[fx.Node, ...]
    matmul: fx.Node
    letters: tuple[str, ...]
    operand_shape: tuple[Size, ...] | None = None
    bias_shape: tuple[Size, ...] | None = None
    scale_shapes: tuple[tuple[Size, ...] | None, tuple[Size, ...] | None] | None = None
    fast_accumulation: bool = False

    @property
    def beside(self) -> list[fx.Node]:
        """What it takes beside its first operand: the other one, a bias, scales."""
        return [node for node in (self.other, self.bias, *(self.scales or ())) if node is not None]

    @property
    def operand_letters(self) -> str:
        """One letter for each dim of the first operand."""
        return self.equation.partition(",")[0]

    @property
    def other_letters(self) -> str:
        """One letter for each dim of the other operand."""
        return self.equation.partition(",")[2].partition("->")[0]

    @property
    def result_letters(self) -> str:
        """One letter for each dim of the result."""
        return self.equation.partition("->")[2]

    def result_dim(self, dim: int, ranks: int) -> int | None:
        """The dim of the equation's result whose equal parts are those of `node`'s dim; None if there is none."""
        letters = self.letters[dim]
        place = self.result_letters.index(letters[0]) if letters else -1
        return place if letters and layouts.divided(self.shape[place], ranks) is not None else None


def products_of(value: fx.Node, also: Sequence[fx.Node] = ()) -> list[Product | Refusal]:
    """Each reader of a value (and of others that hold the same), in order: a matmul as a product, or why it is none.

    >>> from crossfade.graph.text import parse
    >>> program = parse('''
    ... x: f32[2, 6, 8] = input("x")
    ... w: f32[4, 8] = parameter("w")
    ... flat: f32[12, 8] = aten.view(x, [12, 8])
    ... t: f32[8, 4] = aten.t(w)
    ... mm: f32[12, 4] = aten.mm(flat, t)
    ... y: f32[12, 8] = aten.relu(flat)
    ... return output("mm", mm), output("y", y)
    ... ''')
    >>> x, *_ = program.graph.nodes
    >>> product, refusal = products_of(x)
    >>> product.equation, product.other.name, product.shape
    ('abc,cd->abd', 't', (2, 6, 4))
    >>> print(refusal)
    y: something else than a matmul reads it: aten.relu.default reads flat f32[12, 8]
    """
    own = layouts.of_tensor(value.meta["val"])
    reached = spread(dict.fromkeys((value, *also), own))
    found: list[Product | Refusal] = []
    for reader, read in reached.readers.items():
        try:
            found.append(_product_of(value, own, reader, read, reached))
        except Unreadable as error:
            found.append(Refusal(reader, error.reason, error.detail))
    return found


def product_before(value: fx.Node) -> Product | Refusal:
    """The matmul that made a value, or why there is none.

    >>> from crossfade.graph.text import parse
    >>> program = parse('''
    ... x: f32[12, 8] = input("x")
    ... w: f32[8, 4] = parameter("w")
    ... mm: f32[12, 4] = aten.mm(x, w)
    ... y: f32[2, 6, 4] = aten.view(mm, [2, 6, 4])
    ... return output("y", y)
    ... ''')
    >>> *_, y, _ = program.graph.nodes
    >>> product = product_before(y)
    >>> product.equation, product.operand_shape, product.letters
    ('abc,cd->abd', (2, 6, 8), ('a', 'b', 'd'))
    """
    try:
        return _product_before(value)
    except Unreadable as error:
        return Refusal(value, error.reason, error.detail)


@dataclass(frozen=True, slots=True, eq=False)  # by identity: comparing symbolic sizes would guard on them
class _Letter:
    """A letter of an equation, and the size of its dims."""

    name: str
    size: Size


Parts = dict[str, list[_Letter]]
"""What each dim of a matmul as the operator has it consists of in the equation, outermost first."""


def _product_of(value: fx.Node, own: Layout, reader: fx.Node, read: list[fx.Node], reached: Spread) -> Product:
    """A matmul that reads a value, through whatever views, written over the dims that the value itself has.

    Letters are given out in this order: one to each dim of the value; the operand's dims are then groups of these, as
    its layout over the value says, and what it shares with the other operand or the result is known with them; the
    dims that only the other operand has get letters of their own. A result is the operator's result dims, spelled out.
    """
    form, is_left = _form_read(value, reader, read, reached)
    mine, theirs = (form.left, form.right)[:: 1 if is_left else -1]
    mine_dims, other_dims = (form.left_dims, form.right_dims)[:: 1 if is_left else -1]
    layout = reached.tensor(mine)
    assert layout is not None
    names = iter(_names())
    dims = [_Letter(next(names), size) for size in value.meta["val"].shape]
    parts = _parts_of_value(layout, own, mine_dims, dims, names)
    _check_summed(parts, mine_dims, other_dims, form, dims)
    _add_letters(parts, other_dims, theirs, names)
    other, other_letters, other_shape = _operand(theirs, other_dims, parts, _needed(form, parts, dims))
    letters = [parts[name] for name in form.result_dims]
    result = _with_single(dims, [letter for group in letters for letter in group])
    made = Product(
        node=reader,
        equation=f"{_joined(dims)},{_joined(other_letters)}->{_joined(result)}",
        operand=value,
        other=other,
        other_shape=other_shape,
        bias=form.bias,
        scales=None,
        dtype=reader.meta["val"].dtype,
        shape=tuple(letter.size for letter in result),
        nodes=(*_path(mine, set(reached.layouts)), reader),
        matmul=reader,
        letters=tuple(map(_joined, letters)),
        bias_shape=_bias_shape(form, parts, result),
        fast_accumulation=form.fast_accumulation,
    )
    mine_row, other_row = ("m", "n") if is_left else ("n", "m")
    operands = ((dims, mine_row), (other_letters, other_row))
    return _renamed(_scaled(made, form, parts, operands, turned=not is_left))


def _form_read(value: fx.Node, reader: fx.Node, read: list[fx.Node], reached: Spread) -> tuple[Form, bool]:
    """The form of a matmul that reads a value as one of its operands, and whether that is the left one."""
    form = form_of(reader)
    if reader.target in _SIZES:
        raise Unreadable(SIZE_ONLY, f"{reader.name} asks for one of {_described(read[0])}")
    if form is None:
        cut = reached.refused.get(reader)
        why = f", where {cut.reason}: {cut.detail}" if cut is not None else ""
        raise Unreadable(OTHER_READER, f"{reader.target} reads {_described(read[0])}{why}")
    is_left, is_right = (reached.tensor(node) is not None for node in (form.left, form.right))
    if is_left and is_right:
        raise Unreadable("it is both operands of the matmul", f"of {_described(reader)}")
    if not (is_left or is_right) or len(read) > 1:
        raise Unreadable(OTHER_READER, f"{reader.target} reads {_described(read[0])} beside its operands")
    mine = form.left if is_left else form.right
    if mine.meta["val"].dtype != value.meta["val"].dtype:
        raise Unreadable(RETYPED, f"{_described(value)} as {_described(mine)}")
    return form, is_left


def _product_before(value: fx.Node) -> Product:
    """The other way round: the matmul behind a value, written over the dims that the value has.

    Each dim of the value gets a letter for each piece of a result dim in it, so that views may have split and joined
    these. Operands take over the letters of dims that the result has too; dims that are summed over get new ones.
    """
    chain = ancestors(value)
    matmul = chain[-1]
    form = form_of(matmul)
    if form is None:
        made_by = matmul.target if matmul.op == "call_function" else matmul.op
        raise Unreadable(OTHER_MAKER, f"{_described(matmul)} is made by {made_by}")
    if matmul.meta["val"].dtype != value.meta["val"].dtype:
        raise Unreadable(RETYPED, f"{_described(matmul)} as {_described(value)}")
    names = iter(_names())
    letters, parts = _parts_of_result(value, matmul, form, names)
    _add_letters(parts, form.left_dims, form.left, names)
    _add_letters(parts, form.right_dims, form.right, names)
    left, left_letters, left_shape = _operand(form.left, form.left_dims, parts, parts["k"])
    right, right_letters, right_shape = _operand(form.right, form.right_dims, parts, _needed(form, parts, left_letters))
    result = [letter for group in letters for letter in group]
    made = Product(
        node=value,
        equation=f"{_joined(left_letters)},{_joined(right_letters)}->{_joined(result)}",
        operand=left,
        other=right,
        other_shape=right_shape,
        bias=form.bias,
        scales=None,
        dtype=value.meta["val"].dtype,
        shape=tuple(letter.size for letter in result),
        nodes=(matmul, *_path(value, {matmul, *laid_between(matmul, value)})),
        matmul=matmul,
        letters=tuple(map(_joined, letters)),
        operand_shape=left_shape,
        bias_shape=_bias_shape(form, parts, result),
        fast_accumulation=form.fast_accumulation,
    )
    return _renamed(_scaled(made, form, parts, ((left_letters, "m"), (right_letters, "n")), turned=False))


def _add_letters(parts: Parts, dims: Sequence[str | None], operand: fx.Node, fresh: Iterator[str]) -> None:
    """Give letters to those dims of an operand that have none yet; a dim of size 1 needs none."""
    for name, size in zip(dims, operand.meta["val"].shape, strict=True):
        if name is not None and name not in parts:
            parts[name] = [] if same(size, 1) else [_Letter(next(fresh), size)]


def _parts_of_value(
    layout: Layout, own: Layout, names: Sequence[str | None], dims: list[_Letter], fresh: Iterator[str]
) -> Parts:
    """What the operand's dims consist of: whole dims of the value, each once, and repetitions of it."""
    parts: Parts = {}
    used: list[int] = []
    for name, factors in zip(names, layout.dims, strict=True):
        found = layouts.pieces(factors, own)
        for piece in found:
            if piece.dim >= 0 and not same(piece.size, dims[piece.dim].size):
                raise Unreadable(APART, f"{piece.size} of {dims[piece.dim].size} along its dim {piece.dim}")
        used += [piece.dim for piece in found if piece.dim >= 0]
        letters = [dims[piece.dim] if piece.dim >= 0 else _Letter(next(fresh), piece.size) for piece in found]
        if name is not None:
            parts[name] = letters
    expected = [dim for dim, factors in enumerate(own.dims) if factors]
    if sorted(used) != expected or not same(layout.offset, 0):
        raise Unreadable("the matmul reads only a part of it", f"{layout} over {own}")
    return parts


def _check_summed(
    parts: Parts, mine: Sequence[str | None], other: Sequence[str | None], form: Form, dims: list[_Letter]
) -> None:
    """Repetitions of the value are no dims of it: what is summed over must be its own."""
    for name in set(mine) & set(other) - set(form.result_dims):
        for letter in parts[name] if name is not None else ():
            if letter not in dims:
                raise Unreadable("the matmul sums over repetitions of it", f"{letter.size} times")


def _parts_of_result(
    value: fx.Node, matmul: fx.Node, form: Form, names: Iterator[str]
) -> tuple[list[list[_Letter]], Parts]:
    """The letters of each dim of the value, and what the matmul's own result dims consist of."""
    layout, own = layout_of(value, matmul), layouts.of_tensor(matmul.meta["val"])
    found: list[tuple[Piece, _Letter]] = []
    letters: list[list[_Letter]] = []
    for factors in layout.dims:
        group = [(piece, _Letter(next(names), piece.size)) for piece in layouts.pieces(factors, own)]
        letters.append([letter for _, letter in group])
        found += group
    parts: Parts = {}
    for dim, name in enumerate(form.result_dims):
        inside = [entry for entry in found if entry[0].dim == dim]
        inside.sort(key=lambda entry: -size_hint(entry[0].stride))
        sizes = [piece for piece, _ in inside]
        if not _covers(sizes, own.dims[dim]):
            raise Unreadable("it is not all of the matmul's result", f"{layout} over {own}")
        parts[name] = [letter for _, letter in inside]
    if any(piece.dim < 0 for piece, _ in found) or not same(layout.offset, 0):
        raise Unreadable("it is not all of the matmul's result", f"{layout} over {own}")
    return letters, parts


def _covers(found: Sequence[Piece], factors: layouts.Factors) -> bool:
    """Whether pieces, outermost first, are exactly one dim."""
    whole = layouts.merged(layouts.LayoutFactor(piece.size, piece.stride) for piece in found)
    return layouts.same_factors(whole, factors)


def _needed(form: Form, parts: Parts, given: list[_Letter]) -> list[_Letter]:
    """What an operand may not do without: what is summed over, and what the result has and the other has not."""
    return parts["k"] + [letter for name in form.result_dims for letter in parts[name] if letter not in given]


def _operand(
    node: fx.Node, names: Sequence[str | None], parts: Parts, needed: list[_Letter]
) -> tuple[fx.Node, list[_Letter], tuple[Size, ...] | None]:
    """An operand with one dim for each letter: taken before it was repeated, if it was, and the shape it is to have."""
    chain = ancestors(node)
    expanded = [index for index, behind in enumerate(chain) if _repeats(behind)]
    sources = [*(chain[index + 1 : index + 2] for index in expanded[-1:]), [node]]
    problem: Unreadable | None = None
    for (source,) in sources:
        try:
            return _read_from(source, node, names, parts, needed)
        except Unreadable as error:
            problem = problem or error
    assert problem is not None
    raise problem


_SIZES = (torch.ops.aten.sym_size.int, torch.ops.aten.sym_numel.default)


def _repeats(node: fx.Node) -> bool:
    return node.target in (torch.ops.aten.expand.default, torch.ops.aten.expand_as.default)


def _read_from(
    source: fx.Node, node: fx.Node, names: Sequence[str | None], parts: Parts, needed: list[_Letter]
) -> tuple[fx.Node, list[_Letter], tuple[Size, ...] | None]:
    layout = layout_of(node, source)
    found: list[tuple[_Letter, Size]] = []
    for name, factors in zip(names, layout.dims, strict=True):
        letters = parts[name] if name is not None else []
        for letter, group in zip(letters, layouts.grouped(factors, [letter.size for letter in letters]), strict=True):
            if len(group) != 1 or (letter in needed and same(group[0].stride, 0)):
                raise Unreadable(APART, f"{letter.size} of {_described(source)} as {layout}")
            if not same(group[0].stride, 0):
                found.append((letter, group[0].stride))
    if source is not node:
        found.sort(key=lambda entry: -size_hint(entry[1]))
    stride: Size = layout.itemsize
    for letter, at in reversed(found):
        if not same(at, stride):
            raise Unreadable(APART, f"{_described(source)} is read as {layout}")
        stride = stride * letter.size
    shape = tuple(letter.size for letter, _ in found)
    if not same(stride, layouts.product(source.meta["val"].shape) * layout.itemsize):
        raise Unreadable(APART, f"{_described(source)} is read as {layout}")
    return source, [letter for letter, _ in found], None if same_shape(shape, source.meta["val"].shape) else shape


def _bias_shape(form: Form, parts: Parts, result: list[_Letter]) -> tuple[Size, ...] | None:
    """The shape in which a bias is broadcast against the result; None if its own does, or if there is none."""
    if form.bias is None:
        return None
    given = tuple(form.bias.meta["val"].shape)
    names = form.result_dims[len(form.result_dims) - len(given) :]
    inside = [letter for name, size in zip(names, given, strict=True) if not same(size, 1) for letter in parts[name]]
    shape = _aligned(inside, result, f"the bias {_described(form.bias)}")
    while shape and same(shape[0], 1) and len(shape) > 1:
        shape = shape[1:]
    return None if same_shape(shape, given) else shape


def _aligned(inside: list[_Letter], whole: list[_Letter], what: str) -> tuple[Size, ...]:
    """Sizes of letters at their places in a whole, 1 at the others."""
    if inside != [letter for letter in whole if letter in inside]:
        raise Unreadable("its letters are in another order", f"{what}: {_joined(inside)} against {_joined(whole)}")
    return tuple(letter.size if letter in inside else 1 for letter in whole)


def _scaled(
    made: Product, form: Form, parts: Parts, operands: Sequence[tuple[list[_Letter], str]], *, turned: bool
) -> Product:
    """The product with the scales of its operands, if the matmul has some: one for all, or one for each row."""
    if form.scales is None:
        return made
    scales = form.scales[::-1] if turned else form.scales
    shapes = []
    for scale, (letters, row) in zip(scales, operands, strict=True):
        value: Tensor = scale.meta["val"]
        shape = None if same(value.numel(), 1) else _aligned(parts[row], letters, f"the scale {_described(scale)}")
        shapes.append(None if shape is None or same_shape(shape, value.shape) else shape)
    return replace(made, scales=scales, scale_shapes=(shapes[0], shapes[1]))


def _with_single(dims: list[_Letter], result: list[_Letter]) -> list[_Letter]:
    """The result with the value's dims of size 1, which only the first operand has, each beside its neighbour."""
    done = list(result)
    for dim in reversed(range(len(dims))):
        if not same(dims[dim].size, 1):
            continue
        after = next((done.index(neighbour) for neighbour in dims[dim + 1 : dim + 2] if neighbour in done), None)
        before = next((done.index(neighbour) + 1 for neighbour in dims[dim - 1 : dim] if neighbour in done), None)
        done.insert(after if after is not None else before if before is not None else 0, dims[dim])
    return done


def _path(node: fx.Node, inside: set[fx.Node]) -> tuple[fx.Node, ...]:
    """The re-layouts among some nodes that a node is made by, itself included, in order; not what they begin with."""
    found: set[fx.Node] = set()
    stack = [node]
    while stack:
        node = stack.pop()
        behind = [read for read in node.all_input_nodes if read in inside]
        if behind and node not in found:
            found.add(node)
            stack += behind
    return tuple(sorted(found))


def _names() -> str:
    return string.ascii_lowercase + string.ascii_uppercase


def _joined(letters: Sequence[_Letter]) -> str:
    return "".join(letter.name for letter in letters)


def _renamed(made: Product) -> Product:
    """The product with letters in the order in which they appear."""
    order = dict.fromkeys(letter for letter in made.equation if letter.isalpha())
    table = str.maketrans(dict(zip(order, _names(), strict=False)))
    letters = tuple(group.translate(table) for group in made.letters)
    return replace(made, equation=made.equation.translate(table), letters=letters)


def _described(node: fx.Node) -> str:
    return f"{node.name} {render_type(node.meta.get('val'))}"
