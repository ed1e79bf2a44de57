"""What ranks compare at every step: batches, rates, parameters, random generators."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from crossfade.graph.effects import is_random
from crossfade.graph.passes import fingerprint
from crossfade.graph.private import tree_flatten, tree_flatten_with_path, tree_keystr
from crossfade.graph.program import Program
from crossfade.ranks.alike import Batch, Digest, RankComparison, RankInvariant, digest_of
from crossfade.ranks.checkpoint import random_state
from crossfade.ranks.members import Members
from crossfade.ranks.shards import is_distributed, place_of

_WHOLE_BATCH = 'the same whole batch on every rank, of which each computes its part (batch="global")'
_OWN_BATCH = (
    'pass batch="local" to compile_step if each rank brings its own part, as under a DistributedSampler; '
    "otherwise let all ranks load the same batches: one seed, no sampler that splits them"
)
_BY_PLAN = "the same batch on all ranks that hold parts of one model (tensor_parallel)"
_SAMPLE_BY_PLAN = "let samplers split by the rank along dp alone, not along tp"
_WHERE = "restart from the last checkpoint: this step has already used it"
_PARAMETER_SAMPLE = 16384
RANDOM_STREAM = "the random generator's state"


def tensors_of(batch: Batch) -> dict[str, Tensor]:
    """The tensors of a batch by name.

    >>> list(tensors_of(({"x": Tensor([1])}, 2)))
    ["batch[0]['x']"]
    """
    pairs, _ = tree_flatten_with_path(batch)
    return {f"batch{tree_keystr(path)}": leaf for path, leaf in pairs if isinstance(leaf, Tensor)}


def _tensors(batch: Batch) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(batch)[0] if isinstance(leaf, Tensor)]


def same_batch(*, by_plan: bool = False) -> RankInvariant:
    """Every rank is given the whole batch; or the same one, as it holds a part of the same model."""
    return RankInvariant(
        "a batch",
        lambda batch, step: digest_of(_tensors(batch), step),
        lambda step: "its batch sums up to",
        _BY_PLAN if by_plan else _WHOLE_BATCH,
        _SAMPLE_BY_PLAN if by_plan else _OWN_BATCH,
    )


def own_batch() -> RankInvariant:
    """Every rank is given a part of the batch that no other has."""
    return RankInvariant(
        "batch",
        lambda batch, step: digest_of(_tensors(batch), step),
        lambda step: "its batch sums up to",
        'a part of its own for each rank (batch="local")',
        'leave batch="local" out if every rank brings the whole batch, or give each loader a DistributedSampler',
        "differ",
    )


def same_sizes() -> RankInvariant:
    """Parts of the same size on every rank, so that the mean of their means is that of the whole batch."""

    def digest(batch: Batch, step: int) -> Digest:
        return zlib.crc32(repr([tuple(tensor.shape) for tensor in _tensors(batch)]).encode())

    return RankInvariant(
        "the size of a part of the batch",
        digest,
        lambda step: "its sizes sum up to",
        'parts of the same size on every rank (batch="local")',
        'pass batch="uneven" to compile_step if numbers of samples differ, pad samples alike on every rank, then '
        + _WHERE,
    )


def shared_numbers(names: Sequence[str]) -> RankInvariant:
    """Numbers of a batch that the loss depends on, such as how many items all ranks have together."""

    def digest(batch: Batch, step: int) -> Digest:
        tensors = tensors_of(batch)
        return digest_of([tensors[name] for name in names], step)

    return RankInvariant(
        f"{', '.join(names)}, a number that the loss depends on,",
        digest,
        lambda step: "its number sums up to",
        "the whole batch's number on every rank",
        "add it up over the ranks first (torch.distributed.all_reduce)",
    )


def numbers_in_groups(optimizer: Optimizer) -> dict[str, float]:
    """The numbers that parameter groups hold: learning rates, betas, weight decay; also those of tuples and tensors.

    >>> import torch
    >>> numbers_in_groups(torch.optim.SGD([torch.zeros(1)], lr=0.5))
    {'lr.0': 0.5, 'momentum.0': 0, 'dampening.0': 0, 'weight_decay.0': 0}
    """
    found: dict[str, float] = {}
    for index, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key == "params":
                continue
            several = isinstance(value, tuple | list)
            for place, element in enumerate(value if several else [value]):
                element = element.item() if isinstance(element, Tensor) and element.numel() == 1 else element
                if isinstance(element, int | float) and not isinstance(element, bool):
                    found[f"{key}[{place}].{index}" if several else f"{key}.{index}"] = element
    return found


def rates(optimizer: Optimizer) -> RankInvariant:
    """Learning rates and the other numbers of parameter groups, and how many steps were taken."""

    def digest(batch: Batch, step: int) -> int:
        return zlib.crc32(repr((step, numbers_in_groups(optimizer))).encode())

    def words(step: int) -> str:
        numbers = numbers_in_groups(optimizer)
        rates = [f"{value:g}" for name, value in numbers.items() if name.startswith("lr.")]
        others = [f"{name} {value:g}" for name, value in numbers.items() if value and not name.startswith("lr.")]
        return f"lr {', '.join(rates)} in step {step}; {', '.join(others)}".rstrip()

    return RankInvariant(
        "a learning rate, or another number of the optimizer,",
        digest,
        words,
        "the same rates, in the same step, on every rank",
        "step the scheduler, and load checkpoints, alike on every rank, then " + _WHERE,
    )


def replicas(model: nn.Module, optimizer: Optimizer) -> RankInvariant:
    """Parameters and optimizer state of which every rank updates its own copy: some of one at each step."""
    names = [name for name, parameter in model.named_parameters() if not is_distributed(parameter)]
    places: Mapping[str, tuple[dict[str, Any], str]] = {name: place_of(model, name) for name in names}

    def chosen(step: int) -> tuple[str, list[Tensor]]:
        name = names[step % len(names)]
        registry, attribute = places[name]
        parameter = registry[attribute]
        state = optimizer.state.get(parameter, {}).values()
        entries = [value for value in state if isinstance(value, Tensor) and value.shape == parameter.shape]
        return name, [parameter, *entries]

    def digest(batch: Batch, step: int) -> Digest:
        return digest_of(chosen(step)[1], step // len(names), _PARAMETER_SAMPLE)

    return RankInvariant(
        "a parameter, or its optimizer state,",
        digest,
        lambda step: f"{names[step % len(names)]} sums up to",
        "the same on every rank",
        "change weights, and load checkpoints, alike on every rank, then " + _WHERE + "; where ranks run on different "
        "processors, whose last bits differ, pass check_every=0",
    )


def random_stream(model: nn.Module) -> RankInvariant:
    """The random generator, where all ranks draw from one stream."""

    def digest(batch: Batch, step: int) -> Digest:
        return zlib.crc32(b"".join(state.numpy().tobytes() for state in random_state(model).values()))

    return RankInvariant(
        RANDOM_STREAM,
        digest,
        lambda step: "its generator",
        'one stream of random numbers on all ranks (semantics="global"): dropout is no longer that of one device',
        "draw other random numbers (augmentation, sampling) from a generator of your own, or alike on every rank; or "
        'pass semantics="per-rank"',
        "warn",
    )


def same_program(program: Program) -> RankInvariant:
    """The program that runs: a rank that goes back to earlier settings captures nothing, and so agrees on nothing."""
    number = zlib.crc32(fingerprint(program).encode())
    return RankInvariant(
        "the program",
        lambda batch, step: number,
        lambda step: "its program sums up to",
        "the same program on every rank",
        "change settings of the model, the loss and the optimizer alike on every rank, then " + _WHERE,
    )


def comparisons(
    model: nn.Module,
    optimizer: Optimizer,
    program: Program,
    among: Iterable[tuple[str, Members | None, bool]],
    *,
    every: int,
    reduce_op: str,
    whole_batch: bool,
    replicated: bool,
    one_stream: bool,
    numbers: Sequence[str] = (),
    draws: bool | None = None,
) -> list[RankComparison]:
    """What ranks compare at every step, `among` groups by name: whether each trains parts of one model is the last.

    These must have the same batch; so must others if each is given the `whole_batch`, or else the same `numbers` of it
    that the loss depends on. Copies of parameters are compared where they are `replicated` (otherwise a row has one
    owner, who hands it out), the random generator where all draw from `one_stream`: whether the program `draws`
    is asked of it, or given.
    """
    draws = any(is_random(node) for node in program.graph.nodes) if draws is None else draws
    device = next((parameter.device.type for parameter in model.parameters()), "cpu")
    found = []
    for group, members, by_plan in among:
        if members is None or members.alone or not every:
            continue
        same = by_plan or whole_batch
        invariants = [same_program(program), same_batch(by_plan=by_plan) if same else own_batch(), rates(optimizer)]
        invariants += [same_sizes()] if not same else []
        invariants += [shared_numbers(numbers)] if numbers and not same else []
        invariants += [replicas(model, optimizer)] if replicated and not by_plan else []
        invariants += [random_stream(model)] if draws and one_stream else []
        found.append(RankComparison(group, members, invariants, every, device, reduce_op))
    return found


def cost_of_comparing(comparisons: Sequence[RankComparison], batch: Batch) -> dict[str, str]:
    """What comparing costs a step, for its report."""
    if not comparisons:
        return {}
    micros = 1e6 * sum(min(comparison.seconds(batch) for _ in range(3)) for comparison in comparisons)
    size, every = sum(4 * comparison.numbers for comparison in comparisons), comparisons[0].every
    often = "every step" if every == 1 else f"every {every} steps"
    return {"ranks compared": f"{often}: {size} bytes beside the loss, {micros:.0f} us to sum up"}
