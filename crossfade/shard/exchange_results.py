"""Results of a program that ranks exchange where they are ready."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, fx

from crossfade.graph.passes import Verdict
from crossfade.graph.program import Output, Program, tensor_bytes
from crossfade.graph.splice import after, splice


def exchange_results(
    program: Program, exchange: Callable[[Tensor], Tensor], reason_for: Callable[[Output, fx.Node], str | None]
) -> tuple[Verdict, ...]:
    """Replace each result that there is a reason for by what `exchange` makes of it: a collective and its wait."""
    results, verdicts = [], []
    for out, value in program.named_results():
        if (reason := reason_for(out, value)) is not None:
            size = tensor_bytes(value.meta["val"])
            value = splice(program, exchange, value, before=after(program, value), like=value)
            verdicts.append(Verdict.inserted(value.args[0], reason, made_for=out.name, bytes=size))
        results.append(value)
    program.set_results(results)
    return tuple(verdicts)
