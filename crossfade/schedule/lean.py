"""An order that holds little memory: what frees more than it makes goes first, and nothing travels for long."""

from __future__ import annotations

import heapq

from crossfade.schedule.problem import NONE, SchedulingProblem


def lean_order(problem: SchedulingProblem) -> list[int]:
    """Run what lets go of memory as soon as it can; gather just before use; wait as soon as launched."""
    return _Lean(problem).order()


class _Lean:
    def __init__(self, problem: SchedulingProblem) -> None:
        self.problem = problem
        self.size, self.then = problem.storages.size, problem.storages.then
        self.uses = list(problem.storages.uses)
        self.begun = bytearray(len(self.size))
        self.last_user = [0] * len(self.size)
        """The sum of the numbers of those that still have to use a cell: of one that is left, its number."""
        for node in problem.movable:
            for cell in problem.touches[node]:
                self.last_user[cell] += node
        self.missing = [len(before) for before in problem.before]
        self.rank = self._ranks()
        self.ready: list[tuple[float, int]] = []
        self.freeing: list[tuple[int, int]] = []
        self.is_ready = bytearray(len(problem.nodes))
        self.done = bytearray(len(problem.nodes))

    def order(self) -> list[int]:
        for node in self.problem.movable:
            if not self.missing[node]:
                self._enable(node)
        result = []
        while (chosen := self._next()) is not None:
            self.done[chosen] = 1
            result.append(chosen)
            self._account(chosen)
            for other in self.problem.after[chosen]:
                self.missing[other] -= 1
                if not self.missing[other]:
                    self._enable(other)
        return result

    def _ranks(self) -> list[float]:
        """Where each node stood; gathers and what takes them apart where they are used, waits at once."""
        rank = [float(index) for index in range(len(self.problem.nodes))]
        for node in reversed(self.problem.movable):
            start = self.problem.flight_at[node]
            flight = self.problem.flights.get(node if start == NONE else start)
            late = self.problem.loose[node] or (flight is not None and flight.grows)
            if late:
                rank[node] = min((rank[user] for user in self.problem.after[node]), default=rank[node]) - 1e-3
            elif start != NONE:
                rank[node] = -1.0
        return rank

    def _next(self) -> int | None:
        while self.freeing:
            freed, node = heapq.heappop(self.freeing)
            if not self.done[node] and self._net(node) <= freed:
                return node
        while self.ready:
            node = heapq.heappop(self.ready)[1]
            if not self.done[node]:
                return node
        return None

    def _enable(self, node: int) -> None:
        self.is_ready[node] = 1
        heapq.heappush(self.ready, (self.rank[node], node))
        self._note_if_freeing(node)

    def _note_if_freeing(self, node: int) -> None:
        net = self._net(node)
        if net < 0:
            heapq.heappush(self.freeing, (net, node))

    def _net(self, node: int) -> int:
        """Bytes that a node makes, less those that end with it."""
        made = sum(self.size[cell] for cell in self.problem.touches[node] if not self.begun[cell])
        return made - sum(self.size[cell] for cell in self.problem.touches[node] if self.uses[cell] == 1)

    def _account(self, node: int) -> None:
        pending = list(self.problem.touches[node])
        for cell in pending:
            self.begun[cell] = 1
            self.last_user[cell] -= node
        while pending:
            cell = pending.pop()
            self.uses[cell] -= 1
            if self.uses[cell] == 1 and self.is_ready[self.last_user[cell]] and not self.done[self.last_user[cell]]:
                self._note_if_freeing(self.last_user[cell])
            elif not self.uses[cell]:
                pending += self.then[cell]
