"""The names a plan can speak of: modules, parameters and buffers of an exported program, and how each is used.

A weight's use says which of its dims is put out and which is contracted over: `linear` keeps `[out, in]`, transformers'
`Conv1D` keeps `[in, out]`, an embedding `[rows, out]`. It is read off the graph, not off class names.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from crossfade.errors import PlanError
from crossfade.graph.operators import arguments
from crossfade.shard.tensor.plan_prepared import picks_matrices, prepare
from crossfade.shard.tensor.plan_products import CONVOLUTIONS, Product, is_grouped_product, product_of

aten = torch.ops.aten


@dataclass(frozen=True)
class Use:
    """One way a parameter is used: by which module, as what, and which of its dims is put out or contracted over."""

    module: str
    role: str
    """`linear`, `groups` (a convolution in groups), `embedding`, `bias`, `expert` (one matrix of many for each row) or
    `other`"""
    out_dim: int | None = None
    """None, as `in_dim`, where what prepares the weight needs all of that dim."""
    in_dim: int | None = None
    node: fx.Node | None = None
    activations: fx.Node | None = None
    """What is multiplied by the weight."""
    out_at: int = -1
    """Where `out_dim` is in the result, and `in_at` where `in_dim` is in the activations."""
    in_at: int = -1

    @property
    def multiplies(self) -> bool:
        """Whether it is a projection."""
        return self.role in ("linear", "expert") and self.activations is not None

    @property
    def in_groups(self) -> bool:
        """Whether it is a convolution of which each channel sees only those of its group."""
        return self.role == "groups"


@dataclass(frozen=True)
class ProgramNames:
    """What of a program can be named."""

    tensors: Mapping[str, torch.Tensor]
    parameters: frozenset[str]
    canonical: Mapping[str, str]
    """Of each tensor's name the one the graph reads: the same but for tied ones."""
    tied: Mapping[str, tuple[str, ...]]
    """All names of one tensor, by the canonical one."""
    modules: Mapping[str, tuple[str, ...]]
    """The tensors that are a module's own, by the module's name."""
    parents: frozenset[str]
    """The modules that have modules inside."""
    uses: Mapping[str, tuple[Use, ...]]
    """By canonical name."""

    def matching(self, pattern: str) -> list[str]:
        """The names of modules and tensors that a pattern matches."""
        if not is_glob(pattern):
            return [pattern] if pattern in self.modules or pattern in self.tensors else []
        return matches(pattern, (*self.modules, *self.tensors))

    def nearest(self, pattern: str, count: int = 3) -> list[str]:
        """Names like the pattern, numbers in them written `*`; those that end the same way come first."""
        known = list(dict.fromkeys(starred(name) for name in (*self.modules, *self.tensors) if name))
        wanted = starred(pattern)
        last = wanted.rpartition(".")[2]
        same_end = [name for name in known if name == last or name.endswith("." + last)]
        close = difflib.get_close_matches(wanted, known, n=count, cutoff=0.5)
        return list(dict.fromkeys([*difflib.get_close_matches(wanted, same_end, count, 0.0), *close]))[:count]

    def role(self, name: str) -> Use | None:
        """How a tensor is used as a weight or bias; None where it is neither, PlanError where uses disagree."""
        found = [
            use for use in self.uses[self.canonical[name]] if use.role in ("linear", "groups", "embedding", "bias")
        ]
        candidates = [use for use in found if use.module == owner(name)] or found
        if len({(use.role, use.out_dim, use.in_dim) for use in candidates}) > 1:
            ways = ", ".join(sorted(f"{use.role} in {use.module or 'the model'}" for use in candidates))
            raise PlanError(f"{name} is used in several ways ({ways})", remedy="name the parameter with 'shard(<dim>)'")
        return candidates[0] if candidates else None


def owner(name: str) -> str:
    """The module that a parameter or module is in."""
    return name.rpartition(".")[0]


def is_glob(pattern: str) -> bool:
    """Whether a name has wildcards."""
    return any(mark in pattern for mark in "*?[")


def starred(name: str) -> str:
    """A name with `*` for its numbers.

    >>> starred("model.layers.0.mlp.w1")
    'model.layers.*.mlp.w1'
    """
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def matches(pattern: str, names: Iterable[str]) -> list[str]:
    """The names that a pattern matches.

    >>> matches("layers.*.mlp", ["layers.0.mlp", "layers.1.mlp", "layers.1.mlp.up"])
    ['layers.0.mlp', 'layers.1.mlp']
    """
    match = _compiled(pattern).fullmatch
    return [name for name in names if match(name)]


def _compiled(pattern: str) -> re.Pattern[str]:
    """`*`, `?` and `[...]` stay within one part of a name; `**` stands for any number of parts.

    >>> bool(_compiled("layers.*.mlp").fullmatch("layers.0.mlp")), bool(_compiled("layers.*").fullmatch("layers.0.mlp"))
    (True, False)
    >>> bool(_compiled("**.mlp").fullmatch("mlp")), bool(_compiled("**.mlp").fullmatch("a.0.mlp"))
    (True, True)
    """
    text = ""
    for part in pattern.split("."):
        dot = r"\." if text and not text.endswith(_ANY_PARTS) else ""
        text += _ANY_PARTS if part == "**" else dot + _one_part(part)
    return re.compile(text)


_ANY_PARTS = r"(?:[^.]+\.)*?"


def _one_part(part: str) -> str:
    return fnmatch.translate(part).replace(".*", "[^.]*").removeprefix("(?s:").removesuffix(r")\Z").removesuffix(r")\z")


def names_of(exported: ExportedProgram) -> ProgramNames:
    """The names of an exported program."""
    signature = exported.graph_signature
    places = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    readers = {
        places[node.name]: node for node in exported.graph.nodes if node.op == "placeholder" and node.name in places
    }
    tensors, active = _tensors(exported, readers), _active(exported)
    canonical = _canonical(exported, tensors, readers)
    parameters = set(signature.parameters)
    tied: dict[str, list[str]] = {}
    for name, meant in canonical.items():
        tied.setdefault(meant, []).append(name)
    modules: dict[str, list[str]] = {name: [] for name in _called_modules(exported.graph)}
    for name in tensors:
        modules.setdefault(owner(name), []).append(name)
    return ProgramNames(
        tensors=tensors,
        parameters=frozenset(name for name in tensors if canonical[name] in parameters),
        canonical=canonical,
        tied={meant: tuple(group) for meant, group in tied.items()},
        modules={name: tuple(own) for name, own in modules.items()},
        parents=frozenset(map(owner, modules)),
        uses={name: _uses(readers[name], active) if name in readers else () for name in tied},
    )


def _tensors(exported: ExportedProgram, readers: Mapping[str, fx.Node]) -> dict[str, torch.Tensor]:
    """Everything in the state dict or read by the graph: buffers that are not saved are only the latter."""
    tensors = {name: value for name, value in exported.state_dict.items() if isinstance(value, torch.Tensor)}
    return {**tensors, **{name: node.meta["val"] for name, node in readers.items() if name not in tensors}}


def _canonical(
    exported: ExportedProgram, tensors: Mapping[str, torch.Tensor], readers: Mapping[str, fx.Node]
) -> dict[str, str]:
    """Tied names mean the one the graph reads; export keeps an input for each and leaves the others unread."""
    groups: dict[Any, list[str]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(_memory(tensor) if name in exported.state_dict else name, []).append(name)
    canonical = {}
    for group in groups.values():
        read = [name for name in group if name in readers and readers[name].users]
        canonical.update(dict.fromkeys(group, (read or group)[0]))
    return canonical


def _memory(tensor: torch.Tensor) -> Any:
    """Equal for tensors that are the same; programs loaded from a file have several objects over one memory."""
    where = tensor.data_ptr() if tensor.device.type != "meta" and type(tensor) in _PLAIN else 0
    return (where, tensor.shape, tensor.stride(), tensor.dtype, tensor.device) if where else id(tensor)


_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def _called_modules(graph: fx.Graph) -> Iterable[str]:
    called: dict[str, None] = {}
    for node in graph.nodes:
        called.update((entry[0], None) for entry in node.meta.get("nn_module_stack", {}).values())
    return called


def module_of(node: fx.Node) -> str:
    """The module that a node was called in."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    return stack[-1][0] if stack else ""


def _active(exported: ExportedProgram) -> set[fx.Node]:
    """What depends on the inputs that a user gives."""
    given = set(exported.graph_signature.user_inputs)
    found: set[fx.Node] = set()
    for node in exported.graph.nodes:
        if (node.op == "placeholder" and node.name in given) or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _uses(reader: fx.Node, active: set[fx.Node]) -> tuple[Use, ...]:
    """Follow a parameter through what is computed from it alone to what computes with it."""
    prepared = prepare(reader, active)
    if prepared.scales:
        return tuple(Use(module_of(user), "other", node=user) for user, _ in prepared.users)
    return tuple(_use(user, value, prepared.dims_of(value)) for user, value in prepared.users)


def _use(node: fx.Node, value: fx.Node, dims: tuple[int | None, ...]) -> Use:
    module, given = module_of(node), arguments(node)
    product = product_of(node, value)
    if product is not None and (found := _projection(module, product, value, dims)) is not None:
        return found
    if dims == (0,) and given.get(_ADDED.get(node.target)) is value:
        return Use(module, "bias", 0, None, node)
    if node.target is aten.embedding.default and given["weight"] is value and None not in dims:
        return Use(module, "embedding", dims[1], dims[0], node)
    if dims == (0,) and (node.target is aten.add.Tensor or node.target in CONVOLUTIONS):
        return Use(module, "bias", 0, None, node)
    return Use(module, "other", node=node)


_ADDED: dict[Any, str] = {aten.linear.default: "bias", aten.addmm.default: "self"}
"""Operators that add a bias to their product, and what they call it."""


def _projection(module: str, product: Product, value: fx.Node, dims: tuple[int | None, ...]) -> Use | None:
    """A product as a projection: of a matrix, of one for each row or each of a batch, or of groups of channels."""
    in_result, in_input = set(product.result) - {None}, set(product.activations) - {None}
    put_out = [name for name in product.weight if name in in_result and name not in in_input]
    taken_in = [name for name in product.weight if name in in_input and name not in in_result]
    own = dict(zip(product.weight, dims, strict=True))
    shared = [name for name in product.weight if name in in_input and name in in_result and own[name] is not None]
    if product.in_groups:
        return Use(module, "groups", own[shared[0]] if shared else None, None, product.node, product.source)
    if not put_out or not taken_in:
        return None
    out, contracted = put_out[0], taken_in[0]
    picked = picks_matrices(value) or bool(shared) or is_grouped_product(product.node)
    return Use(
        module,
        "expert" if picked else "linear",
        own[out],
        own[contracted],
        product.node,
        product.source,
        product.result.index(out),
        product.activations.index(contracted),
    )
