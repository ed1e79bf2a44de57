"""Every private import and attribute of torch that the package uses, each with its reason and the torch versions it
is known on. Public replacements are welcome: delete the line here when torch grows one.
"""

# ruff: noqa: F401 - what is imported here is for the others

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import torch

# The classes of operators, for isinstance: torch.ops has the operators, but not their classes. Known on 2.11, 2.13.
from torch._ops import HigherOrderOperator, OperatorBase, OpOverload, OpOverloadPacket
from torch._ops import _OpNamespace as OpNamespace

# suggest_memory_format: whether a tensor's strides are those of channels_last; kernels lay out their results by it.
# Known on 2.11, 2.13.
from torch._prims_common import suggest_memory_format

# FakeTensorMode: tensors without data; torch.export and torch.compile stand on it. Known on 2.11, 2.13.
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

# dispatch_functionalize: rewrites mutation into values while tracing, with autograd inside
# (the public torch.func.functionalize forbids autograd inside). Known on 2.11, 2.13.
from torch._subclasses.functional_tensor import dispatch_functionalize

# TorchDispatchMode: sees every ATen call of a function; how spliced functions are recorded. Known on 2.11, 2.13.
from torch.utils._python_dispatch import TorchDispatchMode

# pytree: nested containers of user inputs; torch.utils.pytree is not public on 2.11. Known on 2.11, 2.13.
from torch.utils._pytree import keystr as tree_keystr
from torch.utils._pytree import tree_flatten, tree_flatten_with_path, tree_map_only, tree_unflatten

from crossfade.errors import MeshError


def symbolic_shapes() -> Any:
    """A fresh ShapeEnv that also lets `.item()` become a graph value. Known on 2.11, 2.13."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return ShapeEnv(allow_scalar_outputs=True)


def symbolic_size(env: Any, name: str, hint: int) -> Any:
    """A size that is known by its name, as export's own reader makes it. Known on 2.11, 2.13."""
    import sympy

    symbol = sympy.Symbol(name, positive=True, integer=True)
    add = env.add_backed_var_to_val if hasattr(env, "add_backed_var_to_val") else env.add_var_to_val
    add(symbol, hint)
    env.constrain_symbol_range(symbol, compiler_min=2, compiler_max=1 << 62)
    return env.create_symintnode(symbol, hint=hint)


def symbolic_number(env: Any, name: str, value: float) -> Any:
    """A SymFloat, or for an int a SymInt, that stays a graph input: learning rates, counters. Known on 2.11, 2.13.

    Code that branches on it is traced as for `value`; `branches_since` has what it asked.
    """
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    source = ConstantSource(name)
    symbol = env.create_unspecified_symbol(value, source=source, dynamic_dim=DimDynamic.DYNAMIC)
    make = env.create_symintnode if isinstance(value, int) else env.create_symfloatnode
    return make(symbol, hint=value, source=source)


def branches_since(env: Any, count: int) -> list[Any]:
    """What code asked about symbolic numbers, as sympy expressions that were true, after the first `count` of them.

    Known on 2.11, 2.13.
    """
    return [guard.expr for guard in env.guards[count:]]


def number_expression(number: Any) -> Any:
    """The sympy expression of a number, symbolic or not. Known on 2.11, 2.13."""
    import sympy

    return number.node.expr if isinstance(number, torch.SymInt | torch.SymFloat) else sympy.sympify(number)


def python_text(expression: Any) -> str:
    """A sympy expression of torch's as Python computes it. Known on 2.11, 2.13.

    >>> import sympy
    >>> python_text(sympy.Symbol("s") * 2)
    '2*s'
    """
    from torch.utils._sympy.printers import PythonPrinter

    return str(PythonPrinter().doprint(expression))


def bare_tensor(fake: FakeTensor) -> torch.Tensor:
    """A meta tensor on the memory that a fake one stands for. Known on 2.11, 2.13."""
    empty = torch.empty(0, dtype=fake.dtype, device="meta")
    return empty.set_(fake.untyped_storage(), fake.storage_offset(), fake.shape, fake.stride())  # type: ignore[call-overload]


def fake_tensor(mode: FakeTensorMode, meta: torch.Tensor, device: torch.device) -> FakeTensor:
    """A fake tensor on a device, over a meta tensor and its memory. Known on 2.11, 2.13."""
    return FakeTensor(mode, meta, device)


def size_expression(size: Any) -> Any:
    """The sympy expression of a size, symbolic or not: equal for equal sizes. Known on 2.11, 2.13."""
    import sympy

    return size.node.expr if isinstance(size, torch.SymInt | torch.SymFloat) else sympy.sympify(size)


def statically_equal(first: Any, second: Any) -> bool:
    """Whether sizes (or sequences of them) are equal for all symbols; adds no guard. Known on 2.11, 2.13.

    >>> statically_equal((2, 3), (2, 3)), statically_equal((2, 3), (3, 2))
    (True, False)
    """
    if isinstance(first, tuple | list):
        return len(first) == len(second) and all(map(statically_equal, first, second))
    if not isinstance(first, torch.SymInt | torch.SymFloat) and not isinstance(second, torch.SymInt | torch.SymFloat):
        return bool(first == second)
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return size_expression(first) == size_expression(second) or statically_known_true(first == second)


def default_store() -> Any:
    """The key-value store the default process group met on, which torch does not offer. Known on 2.11, 2.13."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def _group_here(name: str) -> Any:
    """The process group that functional collectives call by this name; None if there is none in this process."""
    from torch.distributed import distributed_c10d

    try:
        return distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
    except RuntimeError:  # the graph is only looked at here
        return None


def backend_of_group(name: str) -> str | None:
    """What the process group runs on that functional collectives call by this name. Known on 2.11, 2.13."""
    group = _group_here(name)
    return str(torch.distributed.get_backend(group)) if group is not None else None


def size_of_group(name: str) -> int | None:
    """How many ranks the process group has that functional collectives call by this name. Known on 2.11, 2.13.

    >>> size_of_group("no such group") is None
    True
    """
    group = _group_here(name)
    return int(group.size()) if group is not None else None


def mark_optimizer_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Tell learning-rate schedulers that the optimizer has stepped, or they warn at each step. Known on 2.11, 2.13."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def schema_of(target: Any) -> Any:
    """What an operator's arguments and results are; None for Python functions and higher-order operators, which have no
    schema. Known on 2.11, 2.13."""
    return getattr(target, "_schema", None)


def has_schema(target: Any) -> bool:
    """Whether a target is an operator that says what its arguments and results are. Known on 2.11, 2.13."""
    return hasattr(target, "_schema")


def registered_operator(operator: Any) -> Any:
    """The overload behind what `torch.library.custom_op` returns; anything else as it is. Known on 2.11, 2.13."""
    return getattr(operator, "_opoverload", operator)


def name_of_packet(packet: Any) -> Any:
    """The name that the overloads of an operator have in common; anything else as it is. Known on 2.11, 2.13."""
    return getattr(packet, "_qualified_op_name", packet)


def is_erased(node: torch.fx.Node) -> bool:
    """Whether a node has left its graph, as for loops over a copy of its nodes. Known on 2.11, 2.13."""
    return node._erased


def rename_node(node: torch.fx.Node, name: str) -> None:
    """Give a node another name, made unique in its graph; setting `name` would not. Known on 2.11, 2.13."""
    node._rename(name)


def keep_codegen(graph: torch.fx.Graph, like: torch.fx.Graph) -> None:
    """Let a graph take its inputs and return its results in the structure of another. Known on 2.11, 2.13."""
    graph.set_codegen(like._codegen)


def memory_id(tensor: torch.Tensor) -> int:
    """A number that tensors, fake ones too, have in common if they share memory. Known on 2.11, 2.13."""
    return tensor.untyped_storage()._cdata


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor's memory was written in place, as autograd counts it. Known on 2.11, 2.13."""
    return tensor._version


def stored_values(tensor: torch.Tensor) -> torch.Tensor:
    """What a sparse tensor stores; of COO also before its entries are sorted. Known on 2.11, 2.13."""
    return tensor._values() if tensor.layout is torch.sparse_coo else tensor.values()


def unwrapped_operator(operator: OpOverload) -> Any:
    """The C++ function inside an operator: calling it saves a Python frame for each node. Known on 2.11, 2.13."""
    return operator._op


def below_autograd() -> Any:
    """Run operators without asking autograd first, which with gradients off only costs. Known on 2.11, 2.13."""
    return torch._C._AutoDispatchBelowAutograd()


def dispatch_modes() -> list[Any]:
    """The modes that see every operator or function of torch now. Known on 2.11, 2.13."""
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return [*_get_current_dispatch_mode_stack(), *_get_current_function_mode_stack()]


@contextlib.contextmanager
def as_if_compiling() -> Iterator[None]:
    """Let `torch.compiler.is_compiling()` be true: models then avoid paths that look at numbers (transformers' masks).

    Known on 2.11, 2.13.
    """
    before, torch.compiler._is_compiling_flag = torch.compiler._is_compiling_flag, True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def module_inside_compiled(model: torch.nn.Module) -> torch.nn.Module:
    """The module that was given to `torch.compile`, of what it returned; any other module itself.

    The front end of torch's compiler is not imported for it: where it is not, nothing was compiled.
    Known on 2.11, 2.13.
    """
    kind = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", None)
    return model._orig_mod if kind is not None and isinstance(model, kind) else model


def swapped_state(model: torch.nn.Module, state: dict[str, torch.Tensor]) -> Any:
    """Run a model on other parameters and buffers for a while; `state` then holds what it left. Known on 2.11, 2.13."""
    from torch.nn.utils import stateless

    return stateless._reparametrize_module(model, state, tie_weights=True)


def has_hooks(parameter: torch.Tensor) -> bool:
    """Whether the user put gradient hooks on a parameter. Known on 2.11, 2.13."""
    return any(getattr(parameter, name) for name in HOOKS_OF_TENSOR)


HOOKS_OF_TENSOR = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""Where a tensor keeps its gradient hooks: None, or a dict of them. Known on 2.11, 2.13."""


def global_module_hooks() -> dict[str, Any]:
    """The hooks that run around every module's forward and backward, by torch's name for them. Known on 2.11, 2.13."""
    from torch.nn.modules import module

    kinds = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")
    return {kind: getattr(module, f"_global_{kind}") for kind in kinds}


def own_parameters(module: torch.nn.Module) -> dict[str, Any]:
    """Where a module keeps its own parameters, None for absent ones: setting an attribute would run its `__setattr__`,
    and the public listings leave out what is shared or absent. Known on 2.11, 2.13."""
    return module._parameters


def own_buffers(module: torch.nn.Module) -> dict[str, Any]:
    """Where a module keeps its own buffers, as `own_parameters`. Known on 2.11, 2.13."""
    return module._buffers


def own_modules(module: torch.nn.Module) -> dict[str, Any]:
    """Where a module keeps its children, as `own_parameters`. Known on 2.11, 2.13."""
    return module._modules


def has_forward_hooks(module: torch.nn.Module) -> bool:
    """Whether the user put hooks around a module's own forward. Known on 2.11, 2.13."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the user put hooks around the optimizer's step. Known on 2.11, 2.13."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def device_sleep(cycles: int) -> None:
    """Keep the current CUDA stream busy for some clock cycles, and one core of the device. Known on 2.11, 2.13."""
    torch.cuda._sleep(cycles)


def group_named(name: str) -> Any:
    """The process group that functional collectives call by this name. Known on 2.11, 2.13."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def new_process_group(name: str, ranks: list[int], backend: str, timeout: Any, description: str) -> Any:
    """A process group of some ranks, this one among them, under a name that its ranks have chosen.

    The public `new_group` chooses the name by the groups that a process has: two ranks of which one has destroyed a
    group would wait for each other under different names, or meet where an old group has left its addresses. Known on
    2.13; the parameters are those of 2.11.
    """
    from torch.distributed import distributed_c10d

    ranks = sorted(ranks)
    default = distributed_c10d._get_default_group()
    if hasattr(default, "new_group"):  # a default group written in Python makes its own
        return torch.distributed.new_group(
            ranks, timeout=timeout, backend=backend, use_local_synchronization=True, group_desc=description
        )
    _, store = distributed_c10d._world.pg_map[default]
    group, _ = distributed_c10d._new_process_group_helper(
        len(ranks),
        ranks.index(default.rank()),
        ranks,
        distributed_c10d.Backend(backend),
        store,
        name,  # type: ignore[arg-type]
        timeout=timeout,
        device_id=default.bound_device_id,
        group_desc=description,
    )
    distributed_c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
    return group


def register_work(tensor: torch.Tensor, work: Any) -> None:
    """Let the functional wait on this tensor wait for that work. Known on 2.11, 2.13."""
    from torch._C import _distributed_c10d

    _distributed_c10d._register_work(tensor, work)


def work_of_future(future: Any) -> Any:
    """A Work that lives in C++ and is done when the future is: C++ may keep it alone. Known on 2.11, 2.13."""
    from torch._C import _distributed_c10d

    return _distributed_c10d._create_work_from_future(future)  # type: ignore[attr-defined]


def untraced(kind: type) -> type:
    """A class whose methods, and what these call, `torch.compile` runs as they are. Known on 2.11, 2.13.

    torch's own decorator imports Dynamo where it is written, or at the first call; and it is of no use where C++ calls
    back into Python.
    """
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

    for value in vars(kind).values():
        if isinstance(value, FunctionType):
            set_code_exec_strategy(value.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return kind


def serve_in_python(group: torch.distributed.ProcessGroup, devices: tuple[str, ...]) -> None:
    """Give a process group written in Python what C++ asks of every one: a name, device types, a default backend.

    All three live in a C++ backend, and none can be written in Python. torch's fake one serves; it is set to raise
    whenever a collective reaches it, since that would be one that passed the Python group by. Known on 2.11, 2.13.
    """
    from torch._C._distributed_c10d import FakeProcessGroup

    options: Any = FakeProcessGroup.Options()  # type: ignore[call-arg]
    options.error_on_collective = True
    refusing = FakeProcessGroup._create_internal(group.rank(), group.size(), options)  # type: ignore[call-arg]
    kind = torch.distributed.ProcessGroup.BackendType.CUSTOM
    for device in devices:
        group._register_backend(torch.device(device), kind, refusing)
    group._set_default_backend(kind)


def exported_program(
    like: Any,
    graph: Any,
    signature: Any,
    state: dict[str, torch.Tensor] | None = None,
    *,
    root: Any = None,
    calls: list[Any] | None = None,
    constants: dict[str, Any] | None = None,
) -> Any:
    """An exported program with another graph and signature; what else is not given is as in `like`.

    With a state of its own it takes other inputs: the examples and the guards, which are code once saved, are then
    left out. Known on 2.11, 2.13.
    """
    done = torch.export.ExportedProgram(
        root=dict(like.graph_module.named_children()) if root is None else root,
        graph=graph,
        graph_signature=signature,
        state_dict=like.state_dict if state is None else state,
        range_constraints=dict(like.range_constraints),
        module_call_graph=like.module_call_graph if calls is None else calls,
        example_inputs=like.example_inputs if state is None else None,
        constants=dict(like.constants) if constants is None else constants,
        verifiers=like.verifiers,
    )
    if state is None and getattr(like, "_guards_code", None):
        done._guards_code = like._guards_code
    return done


def exported_with(exported: Any, state: dict[str, torch.Tensor], constants: dict[str, Any]) -> Any:
    """An exported program with other numbers: the graph is shared, the given one is left. Known on 2.11, 2.13."""
    other = copy.copy(exported)
    other._state_dict, other._constants = state, constants
    return other


def name_group(name: str, group: Any) -> None:
    """Let functional collectives call a process group by another name as well; one name is for one set of ranks, since
    programs that call it stay as they are. Known on 2.11, 2.13."""
    from torch.distributed import distributed_c10d

    try:
        known = distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
    except RuntimeError:
        known = None
    if known is not group:
        if known is not None:
            before, now = (torch.distributed.get_process_group_ranks(either) for either in (known, group))
            if before != now:
                raise MeshError(
                    f"the ranks {', '.join(map(str, now))} to be called {name}",
                    expected=f"the ranks {', '.join(map(str, before))}, which programs of this process call {name}",
                    remedy="give the axes of the two meshes different names, and pass axis=...",
                )
            distributed_c10d._unregister_process_group(name)  # type: ignore[arg-type]
        distributed_c10d._register_process_group(name, group)  # type: ignore[arg-type]


def views_of_bases(target: Any, arguments: dict[str, Any], bases: list[Any]) -> dict[str, Any]:
    """The arguments that an auto-functionalized operator writes, as views of `bases`; what describes them is taken out
    of `arguments`, which then has the operator's others. Known on 2.11, 2.13."""
    from torch._higher_order_ops.auto_functionalize import get_mutable_args, read_view_information_from_args

    found = read_view_information_from_args(*get_mutable_args(target), arguments, bases)

    def view(how: Any) -> Any:
        return None if how is None else how.regenerate_view(bases)

    return {name: [view(part) for part in how] if isinstance(how, list) else view(how) for name, how in found.items()}


def guards_of(mode: FakeTensorMode) -> int:
    """How many conditions on symbolic sizes a fake mode has taken down. Known on 2.11, 2.13."""
    return len(mode.shape_env.guards) if mode.shape_env is not None else 0


def forget_guards(mode: FakeTensorMode, kept: int) -> None:
    """Drop the conditions taken down since there were so many. Known on 2.11, 2.13."""
    del mode.shape_env.guards[kept:]  # type: ignore[union-attr]


def conditions_on_sizes(mode: FakeTensorMode) -> list[Any]:
    """The conditions on symbolic sizes that a fake mode has taken down, as sympy expressions. Known on 2.11, 2.13."""
    return [guard.expr for guard in mode.shape_env.guards] if mode.shape_env is not None else []


def note_conditions(mode: FakeTensorMode, noted: Callable[[Any], None]) -> None:
    """Call `noted` with each condition on symbolic sizes, as it is taken down. Known on 2.11, 2.13."""

    class Guards(list[Any]):
        def append(self, guard: Any) -> None:
            noted(guard.expr)
            super().append(guard)

    mode.shape_env.guards = Guards(mode.shape_env.guards)  # type: ignore[union-attr]


def composite_operators_in_python() -> Any:
    """A context in which composite operators keep symbolic sizes: those in C++ ask for numbers. Known on 2.11, 2.13."""
    from torch._dispatch.python import enable_python_dispatcher

    return enable_python_dispatcher()


def known_sizes(mode: FakeTensorMode) -> dict[str, int]:
    """The symbols of a fake mode that turned out to be numbers. Known on 2.11, 2.13."""
    found = mode.shape_env.replacements if mode.shape_env is not None else {}
    return {str(symbol): int(value) for symbol, value in found.items() if value.is_Integer}


def range_of_size(mode: FakeTensorMode, name: str) -> tuple[int, int]:
    """The least and the largest value that tracing assumes a symbol to have. Known on 2.11, 2.13."""
    ranges = {str(symbol): found for symbol, found in mode.shape_env.var_to_range.items()}  # type: ignore[union-attr]
    found = ranges[name]
    return int(found.lower), int(found.upper)


class SymmetricProducts(NamedTuple):
    """What torch's products through symmetric memory can do in this version."""

    gathers_last_dim: bool
    scatters_last_dim: bool


@functools.cache
def symmetric_products() -> SymmetricProducts:
    """Register torch's products through symmetric memory, and say what they can do. Known on 2.11, 2.13."""
    from torch.distributed import _symmetric_memory as module

    exchange = inspect.signature(module._pipelined_produce_and_all2all)
    return SymmetricProducts(
        gathers_last_dim=hasattr(module, "_pipelined_all_gather_and_consume_last_dim"),
        scatters_last_dim="out_chunk_dim" in exchange.parameters,
    )


def gather_through_symmetric_memory(part: torch.Tensor, group_name: str) -> torch.Tensor:
    """Start torch's all-gather by copy engines: a collective that is waited for like others. Known on 2.11, 2.13, 2.15.

    It reads `part` on a stream of its own, where the allocator does not expect it: the memory is not given to anything
    else before that stream is through with it. Symmetric memory is read from its beginning: a part of such is copied.
    """
    from torch.distributed import _symmetric_memory as module

    is_symmetric = getattr(module, "is_symm_mem_tensor", None)  # younger than torch 2.11
    if not part.is_contiguous() or (part.storage_offset() and is_symmetric is not None and is_symmetric(part)):
        part = part.clone(memory_format=torch.contiguous_format)
    gathered: torch.Tensor = torch.ops.symm_mem._low_contention_all_gather(part, group_name)
    part.record_stream(module._get_backend_stream())
    return gathered


def checkpoint_classes() -> list[Any]:
    """What the metadata of torch.distributed.checkpoint is made of, as it pickles it. Known on 2.11, 2.13."""
    from torch.distributed.checkpoint import filesystem, metadata
    from torch.serialization import _get_layout

    named = [getattr(metadata, name) for name in metadata.__all__]
    return [*named, metadata._MEM_FORMAT_ENCODING, filesystem._StorageInfo, _get_layout]


def rows_of_parts(parts: int) -> Any:
    """The placement of rows of what an axis after this one has split in so many parts: by that axis first, as FSDP2
    does beside tensor parallelism. Known on 2.11, 2.13.

    >>> rows_of_parts(2)
    _StridedShard(dim=0, sf=2)
    """
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(0, split_factor=parts)


def open_archive(path: str) -> Any:
    """torch's reader of .pt2 archives: `get_all_records`, `get_record`. Known on 2.11, 2.13."""
    return torch._C.PyTorchFileReader(path)


def record_bytes(archive: Any, record: str) -> int:
    """The size of a record of an archive; 2.11, which has no other way to ask, reads it."""
    if hasattr(archive, "get_record_size"):
        return archive.get_record_size(record)
    return len(archive.get_record(record))


def load_archive(path: str) -> Any:
    """What torch.export.load reads, without its second try as a format of torch 2.7. Known on 2.11, 2.13."""
    from torch.export.pt2_archive._package import load_pt2

    return load_pt2(path)


def compile_graph(
    module: torch.fx.GraphModule, examples: list[torch.Tensor], options: dict[str, Any]
) -> Callable[..., Sequence[torch.Tensor]]:
    """A graph compiled by Inductor, for inputs like these; options that this torch does not know are left out.

    `torch._inductor.compile` is for graphs that Dynamo has not traced. Known on 2.11, 2.13.
    """
    from torch._inductor import compile as compile_by_inductor

    known = {name: value for name, value in options.items() if name in inductor_options()}
    with torch.no_grad():
        return compile_by_inductor(module, list(examples), known)


def missing_compiler(device: str) -> str:
    """What Inductor lacks to compile for a device, in words; empty if nothing. Known on 2.11, 2.13."""
    if device == "cuda":
        from torch.utils._triton import has_triton

        return "" if has_triton() else "Triton is not installed, or does not know this GPU"
    if device != "cpu":
        return f"device {device!r} is neither cpu nor cuda"
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "no C++ compiler was found: install g++ or clang, or say where in CXX"
    return ""


def inductor_mode(mode: str) -> dict[str, Any]:
    """The options that a `mode` of `torch.compile` stands for. Known on 2.11, 2.13, 2.15."""
    from torch import _inductor

    return dict(_inductor.list_mode_options(mode))


def inductor_options() -> list[str]:
    """The names of Inductor's options. Known on 2.11, 2.13, 2.15."""
    from torch._inductor import config

    return list(config.get_config_copy())


ChangeGraph = Callable[[torch.fx.GraphModule, str], torch.fx.GraphModule]
"""From a graph of AOTAutograd and what it is ("forward", "backward" or "inference") to the one to compile."""


def compile_with_inductor(
    module: torch.fx.GraphModule, inputs: list[Any], change: ChangeGraph, options: dict[str, Any]
) -> Callable[..., Any]:
    """What `torch.compile` makes of Dynamo's graph, each of AOTAutograd's graphs changed before Inductor gets it.

    AOTAutograd's own cache is left out: it knows graphs by what they were before, and would give one that plain
    `torch.compile` has stored. Inductor's, inside, knows them by what they are. Known on 2.11, 2.13, 2.15.
    """
    from torch._functorch import config as functorch_config
    from torch._inductor import compile_fx

    def inner(graph: torch.fx.GraphModule, example_inputs: Any, **given: Any) -> Any:
        phase = "backward" if given.get("is_backward") else "inference" if given.get("is_inference") else "forward"
        return compile_fx.compile_fx_inner(change(graph, phase), example_inputs, **given)

    with functorch_config.patch(enable_autograd_cache=False, enable_remote_autograd_cache=False):
        compiled: Any = compile_fx.compile_fx(module, inputs, inner_compile=inner, config_patches=options)
        return compiled


def compile_through_autograd(
    module: torch.fx.GraphModule, inputs: list[Any], compiler: Callable[[torch.fx.GraphModule, str], Callable[..., Any]]
) -> Callable[..., Any]:
    """Dynamo's graph through AOTAutograd, which gives each forward, backward or inference graph to `compiler`; what
    that returns is called with a list of inputs, which it empties. Known on 2.11, 2.13, 2.15."""
    from functorch.compile import default_partition
    from torch._dynamo.backends.common import aot_autograd

    def boxed(phase: str) -> Callable[..., Any]:
        def compile_graph(graph: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
            compiled = compiler(graph, phase)

            def run(arguments: list[Any]) -> Any:
                return compiled(arguments)

            run._boxed_call = True  # type: ignore[attr-defined]
            return run

        return compile_graph

    return aot_autograd(
        fw_compiler=boxed("forward"),
        bw_compiler=boxed("backward"),
        inference_compiler=boxed("inference"),
        partition_fn=default_partition,
    )(module, inputs)


def outside_of_tracing() -> Any:
    """A context without the modes in which a compiler is called: what it computes is computed. Known on 2.11, 2.13."""
    from torch.utils import _python_dispatch

    return _python_dispatch._disable_current_modes()


def compile_id() -> str:
    """What torch's logs call the frame that is being compiled, such as `0/1`; empty outside. Known on 2.11, 2.13."""
    from torch import _guards

    return str(_guards.CompileContext.current_compile_id() or "")
