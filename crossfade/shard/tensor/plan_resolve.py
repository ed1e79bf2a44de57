"""From the entries of a plan to the sharding of every parameter of one program.

An exact name beats a glob, and among equals a parameter's own name beats its module's. Claims of the same strength must
agree, and so must claims on the names of one tied parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch.export import ExportedProgram

from crossfade.errors import PlanError
from crossfade.shard.tensor.plan_names import ProgramNames, Use, is_glob, names_of, starred
from crossfade.shard.tensor.plan_resolved import ModuleBoundary, ParameterSharding, ResolvedPlan
from crossfade.shard.tensor.plan_styles import Style
from crossfade.shard.tensor.plan_units import Fitted, fit

Split = tuple[int | None, tuple[int, ...]]
"""The dim that is split and the blocks along it."""


@dataclass(frozen=True)
class Claim:
    """What one entry wants for one parameter."""

    pattern: str
    direct: bool
    split: Split
    style: Style

    @property
    def strength(self) -> tuple[bool, bool]:
        return not is_glob(self.pattern), self.direct


def resolve(entries: Mapping[str, Style], exported: ExportedProgram, ranks: int) -> ResolvedPlan:
    """See `Plan.resolve`."""
    if ranks < 1:
        raise PlanError(f"a plan for {ranks} ranks", expected="at least one", remedy="give the size of the mesh's axis")
    names = names_of(exported)
    wanted = _Wanted()
    for pattern, style in entries.items():
        _apply(pattern, style, names, wanted)
    merged = _merge_tied({name: _strongest(name, found) for name, found in wanted.claims.items()}, names)
    boundaries = {module: _agreed(module, found) for module, found in wanted.borders.items()}
    _keep_partners_whole(boundaries, merged, names)
    fitted = fit({name: claim.split for name, claim in merged.items()}, names, ranks)
    parameters = _shardings(merged, names, ranks, fitted)
    notes = wanted.notes + [f"{starred(name)} stays whole: {why}" for name, why in fitted.whole.items()]
    notes += [_padding_note(sharding) for sharding in parameters.values() if sharding.units]
    notes += _little_split(parameters.values())
    return ResolvedPlan(
        parameters=parameters,
        boundaries={module: border for module, border in boundaries.items() if border.input or border.output},
        aliases={name: meant for name, meant in names.canonical.items() if name != meant},
        ranks=ranks,
        notes=tuple(dict.fromkeys(notes)),
    )


@dataclass
class _Wanted:
    """What the entries want, before they are compared."""

    claims: dict[str, list[Claim]] = field(default_factory=dict)
    borders: dict[str, list[tuple[str, ModuleBoundary]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def _apply(pattern: str, style: Style, names: ProgramNames, wanted: _Wanted) -> None:
    """Let one entry claim what it names."""
    matched = names.matching(pattern)
    if not matched:
        raise _no_match(pattern, names)
    shards = False
    for name in matched:
        direct = name in names.tensors
        if direct:
            splits = _direct_split(pattern, style, name, names)
        else:
            splits = _module_splits(pattern, style, name, names, wanted.notes)
            wanted.borders.setdefault(name, []).append((pattern, _boundary(style, name)))
        for tensor, split in splits.items():
            wanted.claims.setdefault(tensor, []).append(Claim(pattern, direct, split, style))
        shards |= any(dim is not None for dim, _ in splits.values())
    if style.shards and not shards:
        raise _shards_nothing(pattern, style, matched, names)


def _no_match(pattern: str, names: ProgramNames) -> PlanError:
    near = names.nearest(pattern)
    remedy = f"write {' or '.join(near)}" if near else "print the program to see its names"
    if starts := [name for name in near if name.endswith("." + pattern)]:
        remedy += f"; the names in this program start with {starts[0].removesuffix(pattern)!r}"
    return PlanError(f"the plan's {pattern!r} names nothing in the program", remedy=remedy)


def _shards_nothing(pattern: str, style: Style, matched: list[str], names: ProgramNames) -> PlanError:
    inside = sorted(name for name in names.tensors if any(name.startswith(f"{module}.") for module in matched))[:3]
    remedy = f"name what it should split ({', '.join(inside)}, ...)" if inside else "leave the entry out"
    found = f"the plan's {pattern!r}: {style} splits no parameter of {', '.join(matched[:3])}"
    return PlanError(found, expected="a linear layer, an embedding, a convolution or a parameter", remedy=remedy)


def _direct_split(pattern: str, style: Style, name: str, names: ProgramNames) -> dict[str, Split]:
    """Of a parameter named itself: matrices by their use, others by position as transformers does."""
    shape = tuple(names.tensors[name].shape)
    if style.kind in ("sequence", "boundary"):
        remedy = "name the module"
        raise PlanError(f"the plan's {pattern!r}: {style} is for modules, and {name} is a parameter", remedy=remedy)
    dim = _direct_dim(style, name, names)
    if dim is None:
        return {name: (None, ())}
    if not -len(shape) <= dim < len(shape):
        found = f"the plan's {pattern!r}: {style}, for {name} of {len(shape)} dims"
        raise PlanError(found, expected="a dim it has", remedy="correct the dim")
    return {name: (dim % len(shape), _block_sizes(pattern, style, name, shape[dim]))}


def _direct_dim(style: Style, name: str, names: ProgramNames) -> int | None:
    if not style.shards:
        return None
    if style.kind == "shard":
        return style.dim
    rank, use = names.tensors[name].ndim, names.role(name) if names.tensors[name].ndim == 2 else None
    if use is not None:
        return use.out_dim if style.kind == "colwise" else use.in_dim
    if rank < 2:
        return None if style.kind == "rowwise" and name.rpartition(".")[2] == "bias" else 0
    return rank - 2 if style.kind == "colwise" else rank - 1


def _module_splits(pattern: str, style: Style, module: str, names: ProgramNames, notes: list[str]) -> dict[str, Split]:
    """Of a module's own parameters: weights and biases by their use."""
    own = [name for name in names.modules[module] if name in names.parameters]
    if style.kind == "shard":
        remedy = f"name the parameter ({', '.join(own) or 'it has none of its own'})"
        raise PlanError(f"the plan's {pattern!r}: {style} is for parameters, and {module} is a module", remedy=remedy)
    if not style.shards:
        return dict.fromkeys(own, (None, ())) if style.kind in ("replicate", "sequence") else {}
    roles = {name: names.role(name) for name in own}
    splits: dict[str, Split] = {}
    for name, use in roles.items():
        dim = _module_dim(style, use) if use is not None else None
        blocks = _block_sizes(pattern, style, name, names.tensors[name].shape[dim]) if dim is not None else ()
        splits[name] = (dim, blocks)
        if use is None:
            notes.append(f"{name} stays whole: the program does not use it as a weight or bias")
    stays_whole = all(dim is None for dim, _ in splits.values())
    if stays_whole and any(names.uses[names.canonical[parameter]] for parameter in own):
        raise _shards_nothing(pattern, style, [module], names)
    return splits


def _module_dim(style: Style, use: Use) -> int | None:
    """A row-wise bias stays whole: it is added once, after the reduction."""
    if style.kind == "colwise":
        return use.out_dim
    return None if use.role == "bias" else use.in_dim


def _block_sizes(pattern: str, style: Style, name: str, size: int) -> tuple[int, ...]:
    if style.blocks == 1:
        return ()
    if isinstance(style.blocks, int) and size % style.blocks == 0:
        return (size // style.blocks,) * style.blocks
    if isinstance(style.blocks, tuple) and sum(style.blocks) == size:
        return style.blocks
    found = f"the plan's {pattern!r}: {style}, for {name} of size {size} there"
    raise PlanError(found, expected=f"blocks that make up {size}", remedy="give the sizes of the blocks")


def _boundary(style: Style, module: str) -> ModuleBoundary:
    """What a style says of activations; what split weights take follows from the weights."""
    output = style.output or "replicate" if style.kind == "rowwise" else style.output
    return ModuleBoundary(module, style.input, output)


def _strongest(name: str, claims: Iterable[Claim]) -> Claim:
    top = max(claim.strength for claim in claims)
    best = [claim for claim in claims if claim.strength == top]
    for other in best[1:]:
        if other.split != best[0].split:
            raise _disagree(name, best[0], other, "name it exactly, or narrow one of the patterns")
    return best[0]


def _disagree(name: str, first: Claim, other: Claim, remedy: str) -> PlanError:
    wants = [f"{claim.pattern!r}: {claim.style} ({_split_text(claim.split)})" for claim in (first, other)]
    return PlanError(f"two entries disagree about {name}: {wants[0]} and {wants[1]}", remedy=remedy)


def _split_text(split: Split) -> str:
    dim, blocks = split
    return "whole" if dim is None else f"split at dim {dim}" + (f" in {len(blocks)} blocks" if blocks else "")


def _merge_tied(chosen: Mapping[str, Claim], names: ProgramNames) -> dict[str, Claim]:
    """One claim for each tensor: tied names may be claimed each, when they agree."""
    merged: dict[str, Claim] = {}
    for name, claim in chosen.items():
        canonical = names.canonical[name]
        known = merged.setdefault(canonical, claim)
        if known.split != claim.split:
            tied = " and ".join(names.tied[canonical])
            raise _disagree(canonical, known, claim, f"split {tied} alike: they are one tensor")
    return merged


def _agreed(module: str, found: list[tuple[str, ModuleBoundary]]) -> ModuleBoundary:
    exact = [entry for entry in found if not is_glob(entry[0])] or found
    for pattern, boundary in exact[1:]:
        if boundary != exact[0][1]:
            both = f"{exact[0][0]!r} and {pattern!r}"
            remedy = "name it exactly, or narrow one of the patterns"
            raise PlanError(f"{both} disagree about what {module} takes or returns", remedy=remedy)
    return exact[0][1]


def _keep_partners_whole(
    boundaries: dict[str, ModuleBoundary], merged: Mapping[str, Claim], names: ProgramNames
) -> None:
    """A module whose parameter is split because a tied module was named returns what it returned before."""
    for canonical, claim in merged.items():
        if claim.direct or claim.split[0] is None or len(names.tied[canonical]) == 1:
            continue
        for use in names.uses[canonical]:
            boundaries.setdefault(use.module, ModuleBoundary(use.module, None, "replicate"))


def _shardings(
    merged: Mapping[str, Claim], names: ProgramNames, ranks: int, fitted: Fitted
) -> dict[str, ParameterSharding]:
    found = {}
    for name in dict.fromkeys(names.canonical[name] for name in names.tensors):
        claim, tensor = merged.get(name), names.tensors[name]
        if claim is None and name not in names.parameters:
            continue
        dim, blocks = claim.split if claim and name not in fitted.whole else (None, ())
        shape = tuple(map(int, tensor.shape))
        style = str(claim.style) if claim else ""
        found[name] = ParameterSharding(name, dim, blocks, style, fitted.units.get(name, 0), shape, tensor.dtype, ranks)
    return found


def _little_split(parameters: Iterable[ParameterSharding]) -> list[str]:
    """That a plan leaves most of a model whole: the library's own plans do, of some models."""
    matrices = [sharding for sharding in parameters if len(sharding.shape) > 1]
    split = sum(sharding.bytes for sharding in matrices if sharding.dim is not None)
    whole = sum(sharding.bytes for sharding in matrices)
    if not split or split >= whole * _LITTLE:
        return []
    return [
        f"the plan splits {split / whole:.0%} of the matrices' bytes: plan.filled(exported, vocab=True) may find more"
    ]


_LITTLE = 0.25
"""The share of a model's bytes below which a plan that splits no more is remarked upon."""


def _padding_note(sharding: ParameterSharding) -> str:
    assert sharding.dim is not None
    sizes = " + ".join(map(str, sharding.blocks)) or str(sharding.shape[sharding.dim])
    why = "" if str(sharding.units) == sizes else f" in {sharding.units} units"
    return f"{starred(sharding.name)}: {sizes} at dim {sharding.dim}{why} over {sharding.ranks} ranks, so it is padded"
