"""How many bytes a program holds when its regions are compiled: what a region is given lives until it ends.

What a region makes inside counts as its operators make and free it one by one: a compiler reuses memory, so that it
holds no more. Where all regions are compiled, what it computes in the one kernel that reads it is never in memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import fx

from crossfade.execute.regions import Region, Regions, base_of, is_view, regions_of
from crossfade.graph.memory import Meter, Storages
from crossfade.graph.per_token import is_pointwise
from crossfade.graph.program import Program
from crossfade.graph.value_numbering import aten_name

_READS_MANY = 4
"""More than so many values read: Inductor then writes down what is read several times."""

# fmt: off
_OFTEN = frozenset({
    "_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data", "native_layer_norm",
    "native_layer_norm_backward", "_fused_rms_norm", "_fused_rms_norm_backward", "nll_loss_forward", "var_mean",
})
"""What reads an element several times, in kernels that compute it."""
# fmt: on

_ONCE = frozenset({"sum", "mean", "amax", "amin"})

_LABELS = "nll_loss_backward"
"""Made of labels where it is read, though it scatters."""


def live_in_regions(program: Program, *, fused: bool = False) -> tuple[int, ...]:
    """Live bytes during each node, beside inputs and constants; during each of a region's, the most in all of it.

    If `fused` all regions are compiled.

    >>> from crossfade.graph.text import parse
    >>> program = parse('''
    ... x: f32[4] = input("x")
    ... a: f32[4] = aten.neg(x)
    ... b: f32[4] = aten.exp(a)
    ... start: f32[4] = c10d.all_reduce(b, "sum", "dp")
    ... done: f32[4] = c10d.wait_tensor(start)
    ... c: f32[4] = aten.neg(done)
    ... d: f32[4] = aten.exp(c)
    ... return output("d", d)
    ... ''', groups={"dp": 2})
    >>> live_in_regions(program)  # a and b in the first region; done, c and d in the second
    (0, 32, 32, 32, 16, 48, 48, 16)
    >>> live_in_regions(program, fused=True)  # a is computed with b, c with d
    (0, 16, 16, 32, 16, 32, 32, 16)
    """
    chosen, storages = _counted(program, fused)
    meter, during = Meter(storages), dict[fx.Node, int]()
    for together in _in_turn(program, chosen, storages):
        most = meter.run_together(together)[0] if len(together) > 1 else meter.run(together[0])[0]
        during.update(dict.fromkeys(together, most))
    return tuple(during[node] for node in program.graph.nodes)


def alive_at_peak_in_regions(program: Program, *, fused: bool = False) -> list[tuple[str, int]]:
    """What is alive when most is: the nodes that made it and its bytes, the largest first; see `live_in_regions`."""
    most = max(live_in_regions(program, fused=fused), default=0)
    chosen, storages = _counted(program, fused)
    meter, sizes = Meter(storages), Counter[str]()
    maker: dict[int, str] = {}
    for node in program.graph.nodes:
        for cell in storages.touches[node]:
            maker.setdefault(cell, node.name)

    def look(live: int) -> None:
        if live == most and not sizes:
            sizes.update(dict.fromkeys(maker.values(), 0))
            for cell, name in maker.items():
                sizes[name] += storages.size[cell] if meter.holds(cell) else 0

    for together in _in_turn(program, chosen, storages):
        meter.run_together(together, look)
        if sizes:
            break
    return sorted(((name, size) for name, size in sizes.items() if size), key=lambda pair: -pair[1])


def _counted(program: Program, fused: bool) -> tuple[Regions, Storages]:
    chosen = regions_of(program)
    unwritten = {node for region in chosen.regions for node in _unwritten(region)} if fused else set[fx.Node]()
    return chosen, Storages(program.graph.nodes, unwritten=unwritten)


def _unwritten(region: Region) -> set[fx.Node]:
    """What a compiler computes where it is read: elements with one reader in the region, which goes through them."""
    inside, reads = set(region.nodes), dict[fx.Node, int]()
    for node in region.nodes:
        readers = _readers(node) if is_pointwise(node.target) or aten_name(node.target) == _LABELS else set()
        if len(readers) != 1 or not readers <= inside:
            continue
        [reader] = readers
        read = sum(reads.get(base_of(source), 1) for source in node.all_input_nodes)
        name = aten_name(reader.target)
        if is_pointwise(reader.target) or name in _ONCE or (name in _OFTEN and read <= _READS_MANY):
            reads[node] = read
    return set(reads)


def _readers(node: fx.Node) -> set[fx.Node]:
    """What uses a value, through whatever looks at it differently."""
    found, waiting = set[fx.Node](), list(node.users)
    while waiting:
        user = waiting.pop()
        if is_view(user):
            waiting += user.users
        else:
            found.add(user)
    return found


def _in_turn(program: Program, chosen: Regions, storages: Storages) -> Iterator[list[fx.Node]]:
    """What runs at once, in turn: regions, each with the views of what it makes, and other nodes by themselves."""
    inside = {node for region in chosen.regions for node in region.nodes}
    ending: dict[fx.Node, list[list[fx.Node]]] = {}
    for region in chosen.regions:
        ending.setdefault(region.end, []).append(region.nodes)
    position = {node: index for index, node in enumerate(program.graph.nodes)}
    begun, waiting = set[int](), list[fx.Node]()
    for node in program.graph.nodes:
        if node in ending:
            for nodes in ending[node]:
                begun.update(cell for each in nodes for cell in storages.touches[each])
                views = [view for view in waiting if begun.issuperset(storages.touches[view])]
                waiting = [view for view in waiting if view not in views]
                yield sorted([*nodes, *views], key=position.__getitem__)
        elif node not in inside and is_view(node) and not begun.issuperset(storages.touches[node]):
            waiting.append(node)
        elif node not in inside:
            begun.update(storages.touches[node])
            yield [node]
