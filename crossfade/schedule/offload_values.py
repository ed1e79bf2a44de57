"""Values moved to the host's memory between their uses in the forward and those in the backward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from crossfade.cost.estimate import estimate
from crossfade.cost.machine import Machine
from crossfade.cost.presets import preset
from crossfade.cost.timeline import simulate
from crossfade.errors import RewriteError
from crossfade.graph import offload
from crossfade.graph.effects import alias_roots, aliased_by
from crossfade.graph.passes import Numerics, Outcome, Pass, PassResult, Verdict, from_context
from crossfade.graph.program import Program
from crossfade.graph.splice import after, insert_call

_HIDDEN = "moved to the host and back under computation"
_EXPOSED = "moved to the host and back, which computation waits for"


@dataclass(frozen=True)
class OffloadValues(Pass):
    """Move the values that `moves` names to the host's memory, and back for their late uses.

    Each is named as `value@left@back`: on its way from where it is made, gone after the node `left`, on its way back
    from after the node `back`, and waited for right before the first use that follows. Views of it are made again.
    Here `moves` is `("exp@neg@sum_1",)`. What was asked to move and stays is in `left`, as `value: reason`.

    Not run by default: a step that offloads (`compile_step(offload=...)`) runs it with what is chosen for that.

    Also known as: activation offloading (`torch.autograd.graph.save_on_cpu`, XLA's host offloading).

    Before:
        x: f32[4] = input("x")
        exp: f32[4] = aten.exp(x)
        neg: f32[4] = aten.neg(exp)
        sum_1: f32[] = aten.sum(neg)
        expand: f32[4] = aten.expand(sum_1, [4])
        mul: f32[4] = aten.mul.Tensor(expand, exp)
        return loss("loss", sum_1), gradient("x", mul)

    After:
        x: f32[4] = input("x")
        exp: f32[4] = aten.exp(x)
        to_host: f32[4] = crossfade.to_host(exp)
        neg: f32[4] = aten.neg(exp)
        on_host: f32[4] = crossfade.on_host(to_host, exp)
        sum_1: f32[] = aten.sum(neg)
        from_host: f32[4] = crossfade.from_host(on_host, device=device("cpu"))
        expand: f32[4] = aten.expand(sum_1, [4])
        on_device: f32[4] = crossfade.on_device(from_host)
        mul: f32[4] = aten.mul.Tensor(expand, on_device)
        return loss("loss", sum_1), gradient("x", mul)
    """

    name = "offload-values"
    numerics = Numerics.BITWISE

    moves: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    machine: Machine | None = from_context()
    measured: Mapping[str, float] | None = from_context()

    def run(self, program: Program) -> PassResult:
        """Insert the copies and waits, and give the late uses what came back."""
        known = {node.name: node for node in program.graph.nodes}
        moves = [tuple(entry.split("@")) for entry in self.moves]
        if wrong := [move for move in moves if len(move) != 3 or not known.keys() >= set(move)]:
            raise RewriteError(
                f"{'@'.join(wrong[0])!r}, to move to the host",
                expected="three names of nodes of this program: value@left@back",
                remedy="choose again: compile with offload=",
            )
        done = move_values(program, [(known[value], known[left], known[back]) for value, left, back in moves])
        size = sum(copy.bytes for copy in done if copy.way == "to_host")
        counts = {"values": len(moves), "bytes": size}
        stay = [(known.get(value), reason) for value, _, reason in (entry.partition(": ") for entry in self.left)]
        left = [Verdict.of(node, Outcome.LEFT, reason) for node, reason in stay if node is not None]
        verdicts = (*self._verdicts(program, done), *left)
        return PassResult(bool(done), counts, verdicts, OffloadValues(self.moves, self.left))

    def _verdicts(self, program: Program, done: list[offload.Copy]) -> list[Verdict]:
        """For each value whether its copies are hidden, by a simulated run."""
        if not done:
            return []
        device = next(copy.node.args[0] for copy in done).meta["val"].device.type  # type: ignore[union-attr]
        machine = self.machine or preset("h200-nvlink-node" if device == "cuda" else "loopback-gloo")
        costs = estimate(program, machine, dict(self.measured or {}))
        exposed = {span.name: span.exposed for span in simulate(program, costs).communication}
        waited = {copy.node: exposed.get(copy.node.name, costs.compute.get(copy.node, 0.0)) for copy in done}
        verdicts = []
        for out, back in zip(done[::2], done[1::2], strict=True):
            seconds = waited[out.node] + waited[back.node]
            outcome, reason = (Outcome.EXPOSED, _EXPOSED) if seconds > 0 else (Outcome.HIDDEN, _HIDDEN)
            detail = f"exposed for {1e3 * seconds:.3f} ms" if seconds > 0 else ""
            value: fx.Node = out.node.args[0]  # type: ignore[assignment]
            verdicts.append(Verdict.of(value, outcome, reason, detail=detail, bytes=out.bytes))
        return verdicts


def move_values(program: Program, moves: list[tuple[fx.Node, fx.Node, fx.Node]]) -> list[offload.Copy]:
    """Write moves into a program: of each value, after which node it has left and after which it is on its way back.

    The copies there and back of each, in order.
    """
    nodes = list(program.graph.nodes)
    position = {node: index for index, node in enumerate(nodes)}
    family: dict[fx.Node, list[fx.Node]] = {value: [] for value, _, _ in moves}
    for node, root in alias_roots(nodes).items():
        if root in family:
            family[root].append(node)
    made = []
    for value, left, back in moves:
        begin, end = position[left], position[back]
        late = _late_uses(family[value], position, begin, end)
        start = insert_call(program, offload.TO_HOST, value, before=after(program, value), like=value)
        there = insert_call(program, offload.ON_HOST, start, value, before=start.next, like=value)
        device = value.meta["val"].device
        return_ = insert_call(program, offload.FROM_HOST, there, before=there.next, like=value, device=device)
        first = min(late, key=position.__getitem__)
        came = insert_call(program, offload.ON_DEVICE, return_, before=first, like=value)
        _use_instead(program, value, came, late, first)
        made.append((start, there, return_, left, back))
    for _, _, return_, _, back in reversed(made):
        back.append(return_)
    for _, there, _, left, _ in made:
        left.append(there)
    for start, _, _, _, _ in made:
        start.args[0].append(start)  # type: ignore[union-attr]
    copies = [offload.view(node) for start, _, return_, _, _ in made for node in (start, return_)]
    return [copy for copy in copies if copy is not None]


def _late_uses(own: list[fx.Node], position: Mapping[fx.Node, int], left: int, back: int) -> list[fx.Node]:
    """What uses a value, or a view of it, after it is back."""
    late = dict[fx.Node, None]()
    for node in own:
        for user in node.users:
            at = position.get(user)  # what is not known was inserted for other moves
            if at is not None and left < at <= back:
                raise RewriteError(
                    f"{user.name} uses {node.name} while that is on the host",
                    expected="no use between the nodes that a move names",
                    remedy="choose again: compile with offload=",
                )
            if at is not None and at > back:
                late[user] = None
    if not late:
        raise RewriteError(
            f"{own[0].name}, to move to the host, is not used after it is back",
            expected="a value with late uses",
            remedy="choose again: compile with offload=",
        )
    return list(late)


def _use_instead(program: Program, value: fx.Node, came: fx.Node, late: list[fx.Node], first: fx.Node) -> None:
    """Let late uses read what came back, through views of it that are made again."""
    inside, instead = set(late), {value: came}

    def found(node: fx.Node) -> fx.Node:
        if node in instead or node in inside or value not in _way(node):
            return instead.get(node, node)
        arguments = fx.map_arg((node.args, node.kwargs), found)
        instead[node] = insert_call(program, node.target, *arguments[0], before=first, like=node, **arguments[1])
        return instead[node]

    for user in late:
        for source in user.all_input_nodes:
            if (new := found(source)) is not source:
                user.replace_input_with(source, new)


def _way(node: fx.Node) -> list[fx.Node]:
    """A node and what it is a view of, in turn."""
    way = [node]
    while (source := aliased_by(way[-1])) is not None:
        way.append(source)
    return way
