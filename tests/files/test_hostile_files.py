"""Files that would run something if they were read as Python, pickle or torch read them: nothing runs."""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from crossfade.errors import BatchError, CaptureError, CrossfadeError, StateError, TextError
from crossfade.files.checkpoints import read_metadata
from crossfade.files.pickled import load_tensors
from crossfade.files.pt2 import load_exported
from crossfade.graph.allowed import operator_named, overload_named, why_refused
from crossfade.graph.text import parse
from crossfade.shard.tensor.placements import REPLICATE, Shard
from crossfade.shard.tensor.sources import source_of

RAN = "ran"


class Runs:
    """Pickles as a call that leaves a file behind."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder / RAN),)


@pytest.fixture(autouse=True)
def nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    yield
    assert not (tmp_path / RAN).exists()


X = 'x: f32[4] = input("x")'
CALLS = {
    "exec": "builtins.exec(\"import os; os.mkdir('ran')\")",
    "eval": "builtins.eval(\"__import__('os').mkdir('ran')\")",
    "open": "builtins.open('ran', 'w')",
    "import": "builtins.__import__('os')",
    "getattr": "builtins.getattr(x, '__class__')",
    "print": "builtins.print('x')",
    "torch.load": "torch.load('ran')",
    "torch.save": "torch.save(x, 'ran')",
    "torch.compile": "torch.compile(x)",
    "library": "torch.ops.load_library('ran')",
    "library-bare": "load_library.__call__('ran')",
    "walk": "torch.os.mkdir('ran')",
    "walk-serialization": "torch.serialization.load('ran')",
    "method": "operator.methodcaller('mkdir')",
    "call": "operator.call(x)",
    "attribute": "operator.attrgetter('__class__')(x)",
    "setitem": "operator.setitem(x, 0, 1)",
    "dunder": "aten.mm.__class__(x)",
    "dunder-first": "__builtins__.exec('1')",
    "from-file": "aten.from_file('ran', True, 4)",
    "save": "aten.save(x, 'ran')",
    "debugging": "debugprims.load_tensor('ran', [4], [1], dtype=f32, device=device('cpu'))",
    "higher-order": "higher_order.print('x')",
    "assembly": "higher_order.inline_asm_elementwise(x, asm_str='x')",
    "lambda": "(lambda: 1)()",
    "comprehension": "aten.cat([x for _ in [1]])",
    "format": "operator.mod('%999999999d', 1)",
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_text_names_only_operators_that_compute(tmp_path: Path, call: str) -> None:
    with pytest.raises(TextError, match="line 2"):
        parse(f'{X}\ny = {call}\nreturn output("x", x)')


def test_operators_are_values_only_if_they_compute() -> None:
    with pytest.raises(TextError, match="line 2"):
        parse(f'{X}\ny = higher_order.out_dtype(torch.load, f32, x)\nreturn output("x", x)')


HUGE = {
    "power": "operator.pow(10, 1000000000)",
    "power-of-power": "builtins.pow(2, 999999999)",
    "shift": "operator.lshift(1, 99999999999)",
    "text": "operator.mul('ab', 9999999999)",
    "list": "operator.mul([0], 9999999999)",
    "results": "aten.unbind(big)",
    "splits": "aten.split.Tensor(big, 1)",
    "chunks": "aten.chunk(big, 999999999)",
    "sections": "aten.tensor_split.sections(big, 999999999)",
    "nested": "[" * 90 + "]" * 90,
    "negated": "aten.add.Tensor(x, " + "-" * 3000 + "1)",
    "added": "aten.add.Tensor(x, " + "1+" * 3000 + "1)",
    "size": "aten.full([999999999999, 999999999999, 999999999], 1)",
    "digits": "aten.add.Tensor(x, " + "9" * 6000 + ")",
    "device": "aten.full([1], 1, device=device('nowhere:99999999999'))",
}


@pytest.mark.parametrize("call", HUGE.values(), ids=HUGE)
def test_what_would_explode_is_refused(call: str) -> None:
    with pytest.raises(TextError):
        parse(f'{X}\nbig: f32[999999999] = input("big")\ny = {call}\nreturn output("x", x)')


def test_powers_that_stay_small_are_computed() -> None:
    program = parse('n: int = scalar("n")\nm = operator.pow(n, 8)\nk = operator.lshift(n, 3)\nreturn output("m", m)')
    assert "operator.lshift(n, 3)" in str(program)


def test_operators_that_read_files_are_refused_by_their_own_name_too() -> None:
    library = torch.library.Library("crossfade_test_pictures", "DEF")
    library.define("read_file(str _0) -> Tensor")
    target = overload_named("crossfade_test_pictures", ["read_file"])
    assert target is not None and why_refused(target) == "read_file names a file"


def test_every_registered_operator_that_may_be_named_computes_tensors() -> None:
    """Walks torch's registry, and whatever else this process has registered."""
    suspicious = ("file", "path", "save", "load_", "print", "record_function", "rpc", "socket", "exec", "library")
    allowed = []
    for schema in torch._C._jit_get_all_schemas():
        namespace, name = schema.name.split("::")
        target = overload_named(namespace, [name, schema.overload_name or "default"])
        if target is not None and why_refused(target) is None:
            allowed.append(schema.name)
            words = [name, *(item.name for item in schema.arguments if str(item.type) == "str")]
            assert not [word for word in words for part in suspicious if part in word.lower()], schema
            assert "Tensor" in str(schema) or "sym" in name or "assert" in name, schema
            assert not [item for item in schema.arguments if "__torch__" in str(item.type) or "Dict" in str(item.type)]
    assert {"aten::mm", "aten::add", "prims::add", "aten::sym_size"} <= set(allowed)


def test_an_operator_of_the_user_may_be_named_unless_it_names_files() -> None:
    with torch.library._scoped_library("hostile", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.define("keep(Tensor x, str filename) -> Tensor")
        assert operator_named("hostile.twice") is not None
        assert operator_named("hostile.keep") is None


def test_the_command_line_runs_nothing(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from crossfade.commands.cli import app

    file = tmp_path / "program.txt"
    file.write_text(f'{X}\ny = {CALLS["exec"]}\nreturn output("x", x)')
    for command in (["explain", str(file)], ["simulate", str(file)]):
        error = CliRunner().invoke(app, command).exception
        assert isinstance(error, TextError) and "program.txt, line 2" in str(error)


def test_pickled_inputs_are_not_run(tmp_path: Path) -> None:
    torch.save((torch.ones(2), Runs(tmp_path)), tmp_path / "inputs.pt")
    with pytest.raises(BatchError, match=r"inputs\.pt.*--trusted"):
        load_tensors(tmp_path / "inputs.pt", BatchError)


def test_trusted_inputs_are_any_object(tmp_path: Path) -> None:
    torch.save({1, 2}.__class__.__name__, tmp_path / "inputs.pt")
    torch.save(complex, tmp_path / "any.pt")
    assert load_tensors(tmp_path / "any.pt", BatchError, trusted=True) is complex
    assert load_tensors(tmp_path / "inputs.pt", BatchError) == "set"


def checkpoint_folder(folder: Path) -> Path:
    import torch.distributed.checkpoint as dcp

    dcp.save({"w": torch.arange(8.0), "note": "hello"}, checkpoint_id=folder / "step", no_dist=True)
    return folder / "step"


def test_checkpoint_metadata_is_read_as_torch_wrote_it(tmp_path: Path) -> None:
    from torch.distributed.checkpoint import FileSystemReader

    folder = checkpoint_folder(tmp_path)
    ours, theirs = read_metadata(folder), FileSystemReader(folder).read_metadata()
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data
    assert torch.equal(source_of(folder).part("w", Shard(0), 1, 2), torch.arange(4.0, 8.0))


def test_checkpoint_metadata_is_not_run(tmp_path: Path) -> None:
    folder = checkpoint_folder(tmp_path)
    (folder / ".metadata").write_bytes(pickle.dumps(Runs(tmp_path)))
    with pytest.raises(StateError, match=r"names posix\.mkdir"):
        source_of(folder)


def test_checkpoint_metadata_changes_no_class(tmp_path: Path) -> None:
    folder = checkpoint_folder(tmp_path)
    evil = b"ctorch.distributed.checkpoint.metadata\nMetadata\n(N}S'version'\nS'evil'\nstb."
    (folder / ".metadata").write_bytes(evil)
    with pytest.raises(StateError, match="changes"):
        read_metadata(folder)
    from torch.distributed.checkpoint.metadata import Metadata

    assert Metadata.version is None


def test_values_in_a_checkpoint_are_not_run(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    from crossfade.files.checkpoints import load_into

    dcp.save({"note": Runs(tmp_path)}, checkpoint_id=tmp_path / "evil", no_dist=True)
    with pytest.raises(StateError, match=r"evil, 'note', which cannot be read as tensors"):
        load_into({"note": ""}, tmp_path / "evil")


def test_a_checkpoint_that_claims_terabytes_reserves_nothing(tmp_path: Path) -> None:
    folder = checkpoint_folder(tmp_path)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.state_dict_metadata["w"].size = torch.Size([10**12])
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(StateError, match="'w', which has 4000000000000 bytes"):
        source_of(folder)


@pytest.fixture(scope="module")
def archive() -> bytes:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.layer(x) + y.sum(0)

    rows = torch.export.Dim("rows", min=2, max=64)
    exported = torch.export.export(
        Model(), (torch.ones(6, 4), torch.ones(6, 4)), dynamic_shapes={"x": {0: rows}, "y": {0: rows}}
    )
    buffer = io.BytesIO()
    torch.export.save(exported, buffer, extra_files={"note.txt": "hello"})
    return buffer.getvalue()


def rewritten(archive: bytes, path: Path, changes: dict[str, Any]) -> Path:
    """The archive with records replaced or added, by the end of their names; a function changes what is there."""
    with zipfile.ZipFile(io.BytesIO(archive)) as old:
        entries = {name: old.read(name) for name in old.namelist()}
    root = next(iter(entries)).partition("/")[0]
    for end, change in changes.items():
        name = next((name for name in entries if name.endswith(end)), f"{root}/{end}")
        entries[name] = change(entries[name]) if callable(change) else change
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as new:
        for name, content in entries.items():
            new.writestr(name, content)
    return path


def replaced(old: str, new: str) -> Any:
    def change(content: bytes) -> bytes:
        assert old in content.decode(), old
        return content.decode().replace(old, new, 1).encode()

    return change


def pickled(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def test_an_archive_is_read_as_torch_reads_it(archive: bytes, tmp_path: Path) -> None:
    path = rewritten(archive, tmp_path / "model.pt2", {})
    ours, extra = load_exported(path)
    theirs, trusted_extra = load_exported(path, trusted=True)
    assert str(ours.graph) == str(theirs.graph) and extra["note.txt"] == trusted_extra["note.txt"] == "hello"
    batch = torch.randn(3, 4), torch.randn(3, 4)
    assert torch.equal(ours.module()(*batch), theirs.module()(*batch))


CODE = "__import__('os').mkdir('ran')"
TREE = '\\"context\\": \\"%s\\"'
ENUM = '{\\\\\\"__enum__\\\\\\": true, \\\\\\"fqn\\\\\\": \\\\\\"this:x\\\\\\"}'
ARCHIVES: dict[str, dict[str, Any]] = {
    "operator": {"models/model.json": replaced("torch.ops.aten.sum.dim_IntList", "torch.os.mkdir")},
    "operator-of-files": {
        "models/model.json": replaced("torch.ops.aten.sum.dim_IntList", "torch.ops.aten.from_file.default")
    },
    "load": {"models/model.json": replaced("torch.ops.aten.sum.dim_IntList", "torch.load")},
    "size": {"models/model.json": replaced("Symbol('", CODE + "+Symbol('")},
    "huge-size": {"models/model.json": replaced("Symbol('", "Integer(10)**Integer(10**9)+Symbol('")},
    "guard": {"models/model.json": replaced("L['y'].size()[0] == ", CODE + " or L['y'].size()[0] == ")},
    "guard-message": {"models/model.json": replaced("L['y'].size()[0] == ", "'\\\", " + CODE + ", \\\"' == ")},
    "name": {"models/model.json": replaced('"name": "sum_1"', f'"name": "x);{CODE}#"')},
    "argument": {"models/model.json": replaced('"forward_arg_names": ["x"', '"forward_arg_names": ["x=' + CODE + '"')},
    "parameter": {"models/model.json": replaced('"layer.weight"', f'"a\\").b;{CODE}#"')},
    "enum": {"models/model.json": replaced(TREE % "null", TREE % ENUM)},
    "library": {"data/aotinductor/model/x.so": b"\x7fELF"},
    "other-model": {"models/other.json": b"{}"},
}  # fmt: skip


@pytest.mark.parametrize("changes", ARCHIVES.values(), ids=ARCHIVES)
def test_code_in_an_archive_is_refused(archive: bytes, tmp_path: Path, changes: dict[str, Any]) -> None:
    try:
        path = rewritten(archive, tmp_path / "model.pt2", changes)
    except AssertionError:
        pytest.skip("this torch writes that otherwise")
    with pytest.raises(CaptureError, match=r"model\.pt2, .*trusted=True"):
        load_exported(path)


@pytest.mark.parametrize("record", ["data/sample_inputs/model.pt", "data/weights/model.pt", "data/constants/model.pt"])
def test_pickles_in_an_archive_are_not_run(archive: bytes, tmp_path: Path, record: str) -> None:
    path = rewritten(archive, tmp_path / "model.pt2", {record: pickled(({"x": 1}, Runs(tmp_path)))})
    with pytest.raises(CaptureError, match=rf"model\.pt2, {record}.*trusted"):
        load_exported(path)


def test_pickled_weights_and_objects_in_an_archive_are_not_run(archive: bytes, tmp_path: Path) -> None:
    def as_pickle(content: bytes) -> bytes:
        config = json.loads(content)
        config["config"]["layer.weight"]["use_pickle"] = True
        return json.dumps(config).encode()

    changes = {"weights_config.json": as_pickle, "data/weights/weight_0": pickled(Runs(tmp_path))}
    with pytest.raises(CaptureError, match=r"data/weights/weight_0"):
        load_exported(rewritten(archive, tmp_path / "weights.pt2", changes))
    entry = {"path_name": "opaque_obj_0", "is_param": False, "use_pickle": True, "tensor_meta": None}
    config = json.dumps({"config": {"thing": entry}}).encode()
    changes = {"constants_config.json": config, "data/constants/opaque_obj_0": pickle.dumps(Runs(tmp_path))}
    with pytest.raises(CaptureError, match=r"opaque_obj_0"):
        load_exported(rewritten(archive, tmp_path / "objects.pt2", changes))


def test_an_archive_of_the_old_format_is_not_tried(tmp_path: Path) -> None:
    """torch reads it with pickle where the new format fails."""
    path = tmp_path / "old.pt2"
    with zipfile.ZipFile(path, "w") as old:
        old.writestr("version", "8.8")
        for name in ("state_dict", "constants", "example_inputs"):
            old.writestr(f"serialized_{name}.pt", pickled(Runs(tmp_path)))
        old.writestr("serialized_exported_program.json", "{}")
    with pytest.raises(CaptureError, match=r"old\.pt2"):
        load_exported(path)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    from safetensors.torch import save_file

    for folder in ("inside", "outside"):
        (tmp_path / folder).mkdir()
        save_file({"w": torch.ones(2)}, str(tmp_path / folder / "model.safetensors"))
    return tmp_path / "inside"


def index(folder: Path, file: str) -> Path:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": file}}))
    return folder


@pytest.mark.parametrize(
    "file",
    [
        "../outside/model.safetensors",
        "a/../../outside/model.safetensors",
        "ABSOLUTE",
        "link.safetensors",
        "linked/model.safetensors",
        "",
        "\x00",
        "x" * 5000,
    ],
)
def test_an_index_names_only_files_in_its_folder(weights: Path, file: str) -> None:
    outside = weights.parent / "outside"
    (weights / "link.safetensors").symlink_to(outside / "model.safetensors")
    (weights / "linked").symlink_to(outside)
    file = str(outside / "model.safetensors") if file == "ABSOLUTE" else file
    with pytest.raises(StateError, match=r"index\.json"):
        source_of(index(weights, file))


def test_a_folder_without_an_index_is_not_left_either(weights: Path) -> None:
    (weights / "link.safetensors").symlink_to(weights.parent / "outside" / "model.safetensors")
    with pytest.raises(StateError, match=r"link\.safetensors.*outside of"):
        source_of(weights)


def test_links_within_one_download_are_followed(weights: Path, tmp_path: Path) -> None:
    """The Hugging Face cache links from snapshots to blobs."""
    blobs, snapshot = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (weights / "model.safetensors").rename(blobs / "0123")
    (snapshot / "model.safetensors").symlink_to("../../blobs/0123")
    assert torch.equal(source_of(index(snapshot, "model.safetensors")).part("w", REPLICATE, 0, 1), torch.ones(2))


def test_spellings_of_passes_are_literals(tmp_path: Path) -> None:
    from crossfade.compile.catalogue import pass_from_spelling

    for options in (f"cap_mb={CODE}", "cap_mb=9**9**9", "cap_mb=" + "-" * 3000 + "1", "cap_mb=1,cap_mb=2",
                    "**{}", "1", "cap_mb=[" * 500, "cap_mb=1)(", "cap_mb='x'", "cap_mb={[]: 1}", "\x00"):  # fmt: skip
        with pytest.raises(CrossfadeError, match="the options of"):
            pass_from_spelling(f"bucket-all-reduces({options})")
