"""`.tinyloop` files: what is written is read back, and every kind of damage is one clear FormatError."""

import errno
import gc
import json
import mmap
import os
import socket
import subprocess
import sys
import textwrap
import tracemalloc

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from samples import LOOPED, PLAIN, random_tensors
from tokenizers import Tokenizer, models

import tinyloop_py as tl
from tinyloop_py import model_file
from tinyloop_py.devices import open_context
from tinyloop_py.errors import FormatError
from tinyloop_py.file_metadata import HEADER_CRC32, TENSOR_CRC32
from tinyloop_py.layout import matrix_shapes, tensor_shapes
from tinyloop_py.model_file import open_model_file
from tinyloop_py.model_writer import ModelWriter, save_model
from tinyloop_py.packing import load_weights
from tinyloop_py.quantize import bf16_from_float32, float32_from_bf16, quantize_rows
from tinyloop_py.weights import WeightTensor

TOKENIZER = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "é": 2}, unk_token="<unk>"))


def parts(path) -> tuple[dict, bytes]:
    """Header and data of a file, parsed plainly."""
    blob = path.read_bytes()
    n = int.from_bytes(blob[:8], "little")
    return json.loads(blob[8 : 8 + n]), blob[8 + n :]


def assemble(path, header, data: bytes, keep_checksum: bool = False) -> None:
    """Write a file from (possibly damaged) parts; without the header's checksum the fault itself has to be found."""
    if isinstance(header, dict):
        if not keep_checksum and isinstance(header.get("__metadata__"), dict):
            header["__metadata__"].pop(HEADER_CRC32, None)
        header = json.dumps(header).encode()
        header += b" " * (-len(header) % 8)
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


@pytest.fixture
def plain(tmp_path):
    path = tmp_path / "plain.tinyloop"
    save_model(path, PLAIN, random_tensors(PLAIN), TOKENIZER, chat_template="{{ messages }}", stop_ids=[3, 1])
    return path


@pytest.fixture
def int8(tmp_path):
    path = tmp_path / "int8.tinyloop"
    save_model(path, PLAIN, random_tensors(PLAIN), dtype="int8")
    return path


# -- what is written is read back


@pytest.mark.parametrize("config", [PLAIN, LOOPED], ids=["plain", "looped"])
@pytest.mark.parametrize(("dtype", "group_size"), [(None, None), ("f32", None), ("bf16", None), ("f16", None), ("int8", None), ("int8", 64)])
def test_round_trip(tmp_path, config, dtype, group_size):
    tensors = random_tensors(config)
    path = tmp_path / "m.tinyloop"
    save_model(path, config, tensors, dtype=dtype, group_size=group_size)
    with open_model_file(path) as file:
        assert file.config == config and file.names == tuple(tensor_shapes(config)) and len(file) == len(file.names)
        assert file.nbytes == path.stat().st_size and file.tokenizer_json is None and file.stop_ids == ()
        file.verify()
        for weight in file:
            x = tensors[weight.name]
            is_matrix = weight.name in matrix_shapes(config)
            assert weight.dtype == ((dtype or "f32") if is_matrix else "f32") and weight.shape == x.shape
            assert weight.data.ndim == 1 and not weight.data.flags.owndata and not weight.data.flags.writeable
            if weight.dtype == "int8":
                q, scales = quantize_rows(x, group_size)
                assert np.array_equal(weight.data, q.reshape(-1)) and np.array_equal(weight.scales, scales) and weight.group_size == group_size
            else:
                rounded = {"f32": lambda x: x, "bf16": lambda x: float32_from_bf16(bf16_from_float32(x)), "f16": lambda x: x.astype(np.float16)}
                assert np.array_equal(weight.to_float32(), rounded[weight.dtype](x))
            rows = weight.rows_float32(slice(0, 1))
            assert np.array_equal(rows.reshape(-1), weight.to_float32().reshape(weight.n_rows, -1)[0])


def test_metadata_round_trip(plain):
    with open_model_file(plain) as file:
        assert file.chat_template == "{{ messages }}" and file.stop_ids == (3, 1)
        assert file.load_tokenizer().get_vocab() == TOKENIZER.get_vocab()


@pytest.mark.parametrize(("dtype", "stored"), [("f32", "F32"), ("bf16", "BF16"), ("f16", "F16"), ("int8", "I8")])
def test_the_safetensors_library_reads_the_same(tmp_path, dtype, stored):
    save_model(tmp_path / "m.tinyloop", LOOPED, random_tensors(LOOPED), dtype=dtype)
    with safe_open(tmp_path / "m.tinyloop", "pt") as theirs, open_model_file(tmp_path / "m.tinyloop") as ours:
        assert theirs.metadata()["format"] == "tinyloop"
        assert theirs.get_slice("core.0.attn.q.weight").get_dtype() == stored
        for weight in ours:
            tensor = theirs.get_tensor(weight.name)
            if dtype == "int8" and weight.scales is not None:
                assert np.array_equal(theirs.get_tensor(weight.name + ".scale").numpy(), weight.scales)
                assert np.array_equal(tensor.numpy().reshape(-1), weight.data)
            else:
                assert np.array_equal(tensor.float().numpy(), weight.to_float32())


def test_bfloat16_without_ml_dtypes(tmp_path):
    tensors = random_tensors(PLAIN)
    bits = {name: bf16_from_float32(x) for name, x in tensors.items()}
    save_model(tmp_path / "m.tinyloop", PLAIN, {name: WeightTensor.bf16(b) if b.ndim == 2 else tensors[name] for name, b in bits.items()})
    with open_model_file(tmp_path / "m.tinyloop") as file:
        assert np.array_equal(file.tensor("embed.weight").data, bits["embed.weight"].reshape(-1))
    with pytest.raises(TypeError, match=r"embed\.weight has type uint16.*WeightTensor\.bf16"):
        save_model(tmp_path / "m.tinyloop", PLAIN, bits)


def test_bfloat16_of_ml_dtypes(tmp_path):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    tensors = random_tensors(PLAIN)
    save_model(tmp_path / "m.tinyloop", PLAIN, {name: x.astype(ml_dtypes.bfloat16) for name, x in tensors.items()})
    with open_model_file(tmp_path / "m.tinyloop") as file:
        assert file.tensor("embed.weight").dtype == "bf16" and file.tensor("final_norm.weight").dtype == "f32"
        assert np.array_equal(file.tensor("embed.weight").data, bf16_from_float32(tensors["embed.weight"]).reshape(-1))


@pytest.mark.parametrize(("dtype", "group_size"), [("bf16", None), ("int8", None), ("int8", 64)])
def test_tensors_of_a_file_are_copied_as_they_are(tmp_path, dtype, group_size):
    save_model(tmp_path / "a.tinyloop", LOOPED, random_tensors(LOOPED), dtype=dtype, group_size=group_size)
    with open_model_file(tmp_path / "a.tinyloop") as file:
        save_model(tmp_path / "b.tinyloop", LOOPED, {weight.name: weight for weight in file}, stop_ids=np.array([1]))
    assert parts(tmp_path / "a.tinyloop")[1] == parts(tmp_path / "b.tinyloop")[1]


def test_a_file_may_mix_types_but_not_within_a_fused_product(tmp_path):
    tensors = random_tensors(PLAIN)
    half = {name: x.astype(np.float16) if ".mlp." in name or "embed" in name else x for name, x in tensors.items()}
    save_model(tmp_path / "m.tinyloop", PLAIN, half)
    with open_model_file(tmp_path / "m.tinyloop") as file:
        assert file.tensor("core.0.mlp.up.weight").dtype == "f16" and file.tensor("core.0.attn.k.weight").dtype == "f32"
    for name, other in (("core.1.attn.v.weight", "core.1.attn.q.weight"), ("core.1.mlp.up.weight", "core.1.mlp.gate.weight")):
        mixed = tensors | {name: tensors[name].astype(np.float16)}
        with pytest.raises(FormatError, match=rf"{other} \(f32\) and {name} \(f16\)"):
            save_model(tmp_path / "n.tinyloop", PLAIN, mixed)


def test_views_outlive_close_and_the_file_does_not_answer_after_it(plain):
    file = open_model_file(plain)
    weight = file.tensor("embed.weight")
    expected = weight.to_float32()
    file.close()
    file.close()
    gc.collect()
    assert np.array_equal(weight.to_float32(), expected)
    with pytest.raises(ValueError, match="is closed"):
        file.tensor("embed.weight")


# -- arguments of the writer


def test_missing_extra_and_misshapen_tensors_are_named(tmp_path):
    path, tensors = tmp_path / "m.tinyloop", random_tensors(PLAIN)
    for change, message in (
        ({"core.1.mlp.up.weight": None}, r"tensor core\.1\.mlp\.up\.weight is missing"),
        ({"core.7.mlp.up.weight": tensors["embed.weight"]}, r"tensor core\.7\.mlp\.up\.weight does not belong"),
        ({"core.0.attn.k.weight": tensors["embed.weight"]}, r"tensor core\.0\.attn\.k\.weight has shape \[40, 32\], the config asks for \[16, 32\]"),
        ({"final_norm.weight": np.full(32, np.nan, np.float32)}, r"tensor final_norm\.weight holds NaN"),
        ({"embed.weight": np.full((40, 32), np.inf, np.float32)}, r"tensor embed\.weight holds NaN or infinity"),
        ({"embed.weight": np.full((40, 32), np.nan, np.float16)}, r"tensor embed\.weight holds NaN or infinity"),
        *(
            ({"embed.weight": WeightTensor.bf16(np.full((40, 32), bits, np.uint16))}, r"embed\.weight holds NaN or")
            for bits in (0x7F80, 0xFF80, 0x7FC1)
        ),
    ):
        changed = {name: x for name, x in (tensors | change).items() if x is not None}
        with pytest.raises(FormatError, match=message):
            save_model(path, PLAIN, changed)
    with pytest.raises(FormatError, match=r"embed\.weight reaches 70000, beyond float16"):
        save_model(path, PLAIN, tensors | {"embed.weight": np.full((40, 32), 7e4, np.float32)}, dtype="f16")
    assert list(tmp_path.iterdir()) == []


def test_bad_arguments_of_save_model(tmp_path):
    path, tensors = tmp_path / "m.tinyloop", random_tensors(PLAIN)
    for kwargs, message in (
        ({"dtype": "q4"}, "dtype is 'q4', expected one of f32, bf16, f16, int8"),
        ({"dtype": "int8", "group_size": 48}, "multiple of 64"),
        ({"dtype": "bf16", "group_size": 64}, "needs dtype int8"),
        ({"stop_ids": [40]}, "stop_ids are .*below vocab_size = 40"),
        ({"stop_ids": [-1]}, "stop_ids"),
        ({"tokenizer": "{}"}, "tokenizer cannot be read"),
        ({"tokenizer": "["}, "tokenizer is not valid JSON"),
        ({"tokenizer": Tokenizer(models.WordLevel({"a": 40}, unk_token="a"))}, "token id 40, the model's vocab_size is 40"),
        ({"chat_template": "\ud800"}, "not valid Unicode"),
    ):
        with pytest.raises(ValueError, match=message):
            save_model(path, PLAIN, tensors, **kwargs)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("argument", ["chat_template", "stop_ids", "tokenizer", "dtype"])
@pytest.mark.parametrize("value", [5, True, {"a": 1}, 1.5, b"1"])
def test_an_argument_of_another_type_is_named_before_anything_is_written(tmp_path, argument, value):
    with pytest.raises(TypeError, match=rf"{argument} must be .*got {type(value).__name__}"):
        save_model(tmp_path / "m.tinyloop", PLAIN, random_tensors(PLAIN), **{argument: value})
    with pytest.raises(TypeError, match=r"stop_ids\[1\] must be an int"):
        save_model(tmp_path / "m.tinyloop", PLAIN, random_tensors(PLAIN), stop_ids=[1, value if isinstance(value, dict) else 1.5])
    assert list(tmp_path.iterdir()) == []


def test_config_and_tensors_of_another_type_are_named(tmp_path):
    for config, tensors, name in ((5, {}, "config"), (PLAIN, [1], "tensors")):
        with pytest.raises(TypeError, match=f"{name} must "):
            save_model(tmp_path / "m.tinyloop", config, tensors)
    with pytest.raises(TypeError, match="chat_template must be a str or None, got list"):
        ModelWriter(tmp_path / "m.tinyloop", PLAIN, "f32", chat_template=["x"])
    save_model(tmp_path / "m.tinyloop", PLAIN, random_tensors(PLAIN), stop_ids=np.array([1, 3], np.int32))
    with open_model_file(tmp_path / "m.tinyloop") as file:
        assert tuple(file.stop_ids) == (1, 3)


def test_a_tokenizer_loses_truncation_and_padding(tmp_path):
    tokenizer = Tokenizer.from_str(TOKENIZER.to_str())
    tokenizer.enable_truncation(1)
    tokenizer.enable_padding(length=4)
    save_model(tmp_path / "m.tinyloop", PLAIN, random_tensors(PLAIN), tokenizer)
    with open_model_file(tmp_path / "m.tinyloop") as file:
        read = file.load_tokenizer()
        assert read.truncation is None and read.padding is None


# -- the file appears whole or not at all


def test_a_failed_write_leaves_the_old_file_and_no_other(plain):
    before = plain.read_bytes()
    with pytest.raises(KeyboardInterrupt), ModelWriter(plain, PLAIN, "f32") as writer:
        writer.write("embed.weight", np.zeros((40, 32), np.float32))
        raise KeyboardInterrupt
    with pytest.raises(FormatError, match=r"tensor core\.0\.attn\.q\.weight \(and \d+ more\) is missing"), ModelWriter(plain, PLAIN, "f32") as writer:
        writer.write("embed.weight", np.zeros((40, 32), np.float32))
    assert plain.read_bytes() == before and os.listdir(plain.parent) == [plain.name]


@pytest.mark.parametrize("call", ["pwrite", "fsync", "replace"])
def test_a_failing_system_call_leaves_the_old_file_and_no_other(plain, monkeypatch, call):
    before = plain.read_bytes()

    def fail(*args):
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match="broken"):
        save_model(plain, PLAIN, random_tensors(PLAIN, 1))
    monkeypatch.undo()
    assert plain.read_bytes() == before and os.listdir(plain.parent) == [plain.name]


def test_a_full_disk_shows_before_any_work(plain, monkeypatch):
    before = plain.read_bytes()

    def full(*args):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"not enough space: \d+ bytes are needed, \d+ are free") as caught:
        ModelWriter(plain, PLAIN, "f32")
    assert caught.value.errno == errno.ENOSPC
    assert plain.read_bytes() == before and os.listdir(plain.parent) == [plain.name]


def test_a_file_size_limit_leaves_the_old_file_and_no_other(plain):
    code = textwrap.dedent("""
        import resource, signal, sys, numpy as np
        from samples import PLAIN, random_tensors
        from tinyloop_py.model_writer import save_model
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        try:
            save_model(sys.argv[1], PLAIN, random_tensors(PLAIN))
        except OSError as error:
            print(error)
        else:
            sys.exit("no error")
    """)
    before = plain.read_bytes()
    here = os.path.dirname(os.path.abspath(__file__))
    env = os.environ | {"PYTHONPATH": os.pathsep.join([os.path.dirname(here), here, os.environ.get("PYTHONPATH", "")])}
    run = subprocess.run([sys.executable, "-c", code, str(plain)], env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "File too large" in run.stdout
    assert plain.read_bytes() == before and os.listdir(plain.parent) == [plain.name]


def test_where_it_cannot_be_written(tmp_path):
    with pytest.raises(FileNotFoundError, match="folder to write into does not exist"):
        save_model(tmp_path / "no" / "m.tinyloop", PLAIN, random_tensors(PLAIN))
    (tmp_path / "d").mkdir()
    with pytest.raises(IsADirectoryError):
        save_model(tmp_path / "d", PLAIN, random_tensors(PLAIN))


def bound_socket(path):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.fspath(path))


@pytest.mark.parametrize("make, kind", [(os.mkfifo, "a FIFO"), (os.mkdir, "a folder"), (bound_socket, "a socket")])
@pytest.mark.parametrize("through_link", [False, True])
def test_a_destination_that_is_no_regular_file_is_refused_and_stays(tmp_path, monkeypatch, make, kind, through_link):
    monkeypatch.chdir(tmp_path)  # a socket's path has to be short
    make("there")
    path = "there"
    if through_link:
        os.symlink("there", "link")
        path = "link"
    before = os.lstat("there")
    with pytest.raises(OSError, match=rf"cannot write a file over {kind}.*'{path}'"):
        save_model(path, PLAIN, random_tensors(PLAIN))
    assert (os.lstat("there").st_ino, os.lstat("there").st_mode) == (before.st_ino, before.st_mode)
    assert set(os.listdir()) <= {"there", "link"}


def test_a_fifo_made_while_a_file_is_written_stays(tmp_path):
    path = tmp_path / "m.tinyloop"
    tensors = random_tensors(PLAIN)
    with pytest.raises(OSError, match="cannot write a file over a FIFO"), ModelWriter(path, PLAIN, "f32") as writer:
        for name in writer.names:
            writer.write(name, tensors[name])
        os.mkfifo(path)
    assert os.listdir(tmp_path) == [path.name] and path.is_fifo()


def test_paths_may_be_bytes(tmp_path):
    path = os.fsencode(tmp_path / "m.tinyloop")
    save_model(path, PLAIN, random_tensors(PLAIN))
    with open_model_file(path) as file:
        assert file.path == os.fsdecode(path)
    with pytest.raises(TypeError, match=r"expected str, bytes or os\.PathLike object, not int"):
        save_model(5, PLAIN, random_tensors(PLAIN))
    assert os.listdir(tmp_path) == ["m.tinyloop"]


def test_a_link_is_followed_and_permissions_are_the_usual_ones(plain):
    link = plain.with_name("link.tinyloop")
    link.symlink_to(plain.name)
    save_model(link, PLAIN, random_tensors(PLAIN, 1), dtype="bf16")
    assert link.is_symlink() and open_model_file(plain).tensor("embed.weight").dtype == "bf16"
    umask = os.umask(0)
    os.umask(umask)
    assert plain.stat().st_mode & 0o777 == 0o666 & ~umask


def test_writer_refuses_a_second_write_and_wrong_blocks(tmp_path):
    path, x = tmp_path / "m.tinyloop", np.zeros((40, 32), np.float32)
    with pytest.raises(ValueError, match=r"embed\.weight was written already"), ModelWriter(path, PLAIN, "f32") as writer:
        writer.write("embed.weight", x)
        writer.write("embed.weight", x)
    shape = "rows of shape"
    for blocks, message in (([x[:39]], "39 rows, expected 40"), ([x, x[:1]], shape), ([x[:, :31]], shape), ([x[0]], shape)):
        with pytest.raises(FormatError, match=rf"tensor embed\.weight: {message}"), ModelWriter(path, PLAIN, "f32") as writer:
            writer.write_blocks("embed.weight", iter(blocks))
    assert list(tmp_path.iterdir()) == []


# -- damage


def test_what_is_no_model_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        open_model_file(tmp_path / "absent.tinyloop")
    with pytest.raises(FormatError, match=r"a folder, expected a \.tinyloop file"):
        open_model_file(tmp_path)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(FormatError, match=r"a FIFO, expected a \.tinyloop file"):
        open_model_file(tmp_path / "fifo")
    for content, message in (
        (b"", "too short"), (b"1234567", "too short"), (b"GGUF" + bytes(60), "a GGUF file, .*tinyloop convert"),
        (b"\x89PNG" + bytes(60), "header would have|truncated"),
        ((2**63).to_bytes(8, "little") + b"{}", "its header would have 9223372036854775808 bytes"), ((10).to_bytes(8, "little") + b"{}", "truncated"),
        ((2).to_bytes(8, "little") + b"[]", "expected an object"), ((2).to_bytes(8, "little") + b"\xff\xfe", "not UTF-8"),
        ((2).to_bytes(8, "little") + b"{}", "not of tinyloop"), ((90).to_bytes(8, "little") + b"[" * 90, "not valid JSON"),
        ((200_000).to_bytes(8, "little") + b'{"a":' + b"[" * 199_995, "not valid JSON"),
    ):  # fmt: skip
        (tmp_path / "f").write_bytes(content)
        with pytest.raises(FormatError, match=message) as caught:
            open_model_file(tmp_path / "f")
        assert str(caught.value).startswith(str(tmp_path / "f"))


def test_every_truncation_is_refused(plain):
    blob = plain.read_bytes()
    for n in {*range(64), *range(64, len(blob), 97), len(blob) - 1}:
        plain.write_bytes(blob[:n])
        with pytest.raises(FormatError):
            open_model_file(plain)
    plain.write_bytes(blob + b"\0")
    with pytest.raises(FormatError, match="1 bytes follow tensor"):
        open_model_file(plain)


def test_a_file_cut_while_it_opens_is_a_format_error(plain, monkeypatch):
    def cut_then_map(fd, *args, mmap=mmap.mmap, **kwargs):
        os.truncate(plain, plain.stat().st_size // 2)
        return mmap(fd, *args, **kwargs)

    monkeypatch.setattr("mmap.mmap", cut_then_map)
    with pytest.raises(FormatError, match=rf"{plain}: truncated: it had \d+ bytes, now \d+"):
        open_model_file(plain)


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
@pytest.mark.parametrize("kept", [0, 0.3, 0.9])
def test_a_file_cut_after_it_was_opened_is_a_format_error_that_names_the_tensor(tmp_path, dtype, kept):
    """Through a mapping it would be a SIGBUS, which ends the process."""
    path = tmp_path / "m.tinyloop"
    save_model(path, PLAIN, random_tensors(PLAIN), dtype=dtype)
    context = open_context("cpu", 1)[0]
    with open_model_file(path) as file:
        os.truncate(path, int(kept * file.nbytes))
        for use in (file.verify, lambda: load_weights(context, file), lambda: [file.read(name) for name in file.names]):
            with pytest.raises(FormatError, match=rf"^{path}: tensor \S+ ends early"):
                use()


def test_a_file_cut_while_its_small_values_are_checked_is_a_format_error(plain, monkeypatch):
    def cut_then_check(file, check=model_file._check_small_values):
        os.truncate(plain, 8)
        check(file)

    monkeypatch.setattr(model_file, "_check_small_values", cut_then_check)
    with pytest.raises(FormatError, match=rf"^{plain}: tensor \S+ ends early"):
        open_model_file(plain)


def test_a_file_written_to_while_weights_are_loaded_is_a_format_error(plain):
    context = open_context("cpu", 1)[0]
    with open_model_file(plain) as file:
        os.utime(plain, ns=(0, 1))
        with pytest.raises(FormatError, match="was changed while it was read"):
            load_weights(context, file)


def test_what_is_read_is_what_is_mapped(int8, plain):
    for path in (int8, plain):
        with open_model_file(path) as file:
            for name in file.names:
                read, mapped = file.read(name), file.tensor(name)
                assert (read.dtype, read.shape, read.group_size) == (mapped.dtype, mapped.shape, mapped.group_size)
                assert np.array_equal(read.data, mapped.data) and np.array_equal(read.to_float32(), mapped.to_float32())
        with pytest.raises(ValueError, match="is closed"):
            file.read("embed.weight")


def _metadata(**changes):
    def change(header):
        for key, value in changes.items():
            if value is None:
                del header["__metadata__"][key]
            else:
                header["__metadata__"][key] = value

    return change


def _entry(name, **changes):
    return lambda header: header[name].update(changes)


def _swap(a, b):
    def change(header):
        header[a], header[b] = header[b], header[a]

    return change


def _config(**changes):
    def change(header):
        config = json.loads(header["__metadata__"]["config"]) | changes
        header["__metadata__"]["config"] = json.dumps({k: v for k, v in config.items() if v != "absent"})

    return change


DAMAGE = {
    "format": (_metadata(format="pt"), "not of tinyloop .format 'pt'"),
    "no format": (_metadata(format=None), "not of tinyloop"),
    "version": (_metadata(version="2"), "version is '2', this tinyloop reads version 1"),
    "no config": (_metadata(config=None), "lacks the config"),
    "config text": (_metadata(config="{"), "config is not valid JSON"),
    "config list": (_metadata(config="[]"), "config is a JSON list"),
    "config key twice": (_metadata(config='{"dim": 1, "dim": 2}'), "'dim' appears twice"),
    "config field": (_config(dim="absent"), "config lacks field.s. dim"),
    "config unknown": (_config(depth=3), "unknown field.s. .depth"),
    "config value": (_config(n_kv_heads=3), "n_kv_heads is 3, expected a divisor"),
    "config type": (_config(norm_eps=[1]), "norm_eps"),
    "config beyond float": (_config(norm_eps=10**400), "norm_eps"),
    "billions of layers": (_config(n_core=2**31 - 1), "the config has 2147483647 layers, the file only|n_core is 2147483647"),
    "thousands of layers": (_config(n_core=4096), "the config has 4096 layers, the file only"),
    "a layer more": (_config(n_core=3), r"tensor core\.2\.attn\.q\.weight is missing"),
    "a layer less": (_config(n_core=1), r"tensor core\.1\.\S+ \(and \d+ more\) does not belong"),
    "untied": (_config(tied_embeddings=False), r"tensor head\.weight is missing"),
    "stop ids text": (_metadata(stop_ids="x"), "stop_ids is not valid JSON"),
    "stop ids": (_metadata(stop_ids="[40]"), "stop_ids are .40., expected token ids below"),
    "stop id true": (_metadata(stop_ids="[true]"), "stop_ids"),
    "group size": (_metadata(group_size="0"), "group_size is '0'"),
    "metadata type": (_metadata(stop_ids=[1]), "__metadata__ must map text to text"),
    "metadata list": (lambda h: h.update(__metadata__=[]), "__metadata__ must map text to text"),
    "template": (_metadata(chat_template="\ud800"), "chat_template is not valid Unicode"),
    "checksums": (_metadata(tensor_crc32="[]"), "tensor_crc32 is a JSON list"),
    "missing": (lambda h: h.pop("final_norm.weight"), r"tensor|bytes follow"),
    "entry type": (lambda h: h.update({"embed.weight": 3}), r"tensor 'embed\.weight': its header entry"),
    "entry keys": (_entry("embed.weight", extra=1), r"tensor 'embed\.weight': its header entry"),
    "dtype": (_entry("embed.weight", dtype="F31"), r"tensor 'embed\.weight': unknown type 'F31'"),
    "dtype list": (_entry("embed.weight", dtype=[]), r"tensor 'embed\.weight': unknown type"),
    "wrong dtype": (_entry("embed.weight", dtype="I32"), r"tensor embed\.weight has type I32, expected f32 or bf16"),
    "int8 norm": (_entry("final_norm.weight", dtype="I8", shape=[128]), r"tensor final_norm\.weight has shape \[128\]"),
    "shape": (_entry("embed.weight", shape=[32, 40]), r"tensor embed\.weight has shape \[32, 40\], the config asks for \[40, 32\]"),
    "shape product": (_entry("embed.weight", shape=[40, 31]), r"tensor 'embed\.weight': F32 of shape \[40, 31\] takes"),
    "shape negative": (_entry("embed.weight", shape=[-40, -32]), r"tensor 'embed\.weight': shape is"),
    "shape float": (_entry("embed.weight", shape=[40.0, 32]), r"tensor 'embed\.weight': shape is"),
    "shape true": (_entry("embed.weight", shape=[True, 1280]), r"tensor 'embed\.weight': shape is"),
    "shape huge": (_entry("embed.weight", shape=[10**30, 10**30]), r"tensor 'embed\.weight': F32 of shape .* takes"),
    "offsets order": (_entry("embed.weight", data_offsets=[8, 4]), r"tensor 'embed\.weight': data_offsets"),
    "offsets one": (_entry("embed.weight", data_offsets=[8]), r"tensor 'embed\.weight': data_offsets"),
    "offsets beyond": (_entry("embed.weight", data_offsets=[10**12, 10**12 + 5120]), r"tensor 'embed\.weight': ends at byte .* \(truncated"),
    "offsets float": (_entry("embed.weight", data_offsets=[0.0, 5120]), r"tensor 'embed\.weight': data_offsets"),
    "overlap": (_entry("core.0.attn.v.weight", data_offsets=[0, 2048]), r"tensor '\S+' overlaps"),
    "swapped": (_swap("core.0.attn.q.weight", "core.0.attn.k.weight"), r"tensor core\.0\.attn\.q\.weight has shape \[16, 32\]"),
    "renamed": (lambda h: h.update({"core.0.attn.Q.weight": h.pop("core.0.attn.q.weight")}), r"tensor core\.0\.attn\.q\.weight is missing"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_named(plain, case):
    change, message = DAMAGE[case]
    header, data = parts(plain)
    change(header)
    assemble(plain, header, data)
    with pytest.raises(FormatError, match=message):
        open_model_file(plain)


def test_a_gap_and_a_duplicate_key_are_refused(plain):
    header, data = parts(plain)
    for entry in header.values():
        if "data_offsets" in entry:
            entry["data_offsets"] = [n + 4 for n in entry["data_offsets"]]
    assemble(plain, header, bytes(4) + data)
    with pytest.raises(FormatError, match="leaves a gap behind the header"):
        open_model_file(plain)
    text = json.dumps(header)
    assemble(plain, (text[:-1] + ', "embed.weight": ' + json.dumps(header["embed.weight"]) + "}").encode(), data)
    with pytest.raises(FormatError, match=r"'embed\.weight' appears twice"):
        open_model_file(plain)


def test_a_misaligned_tensor_is_refused(tmp_path):
    tensors = random_tensors(PLAIN)
    save_model(tmp_path / "m.tinyloop", PLAIN, tensors)
    header, data = parts(tmp_path / "m.tinyloop")
    text = json.dumps(header)
    assemble(tmp_path / "m.tinyloop", (text + " " * (1 - len(text) % 2)).encode(), data)  # an odd header is legal safetensors
    with pytest.raises(FormatError, match="not aligned for f32"):
        open_model_file(tmp_path / "m.tinyloop")


@pytest.mark.parametrize("value", [np.nan, -1.0, np.inf])
def test_bad_scales_are_refused(int8, value):
    header, data = parts(int8)
    start, _ = header["core.1.mlp.down.weight.scale"]["data_offsets"]
    assemble(int8, header, data[:start] + np.float32(value).tobytes() + data[start + 4 :])
    with pytest.raises(FormatError, match=r"tensor core\.1\.mlp\.down\.weight\.scale holds a scale"):
        open_model_file(int8)


def test_int8_without_scales_and_with_scales_of_another_shape(int8):
    header, data = parts(int8)
    name = "core.0.attn.q.weight.scale"
    for change, message in (
        (lambda h: h.update({"other": h.pop(name)}), f"tensor {name} is missing"),
        (_entry(name, shape=[16, 2]), rf"tensor {name} has shape \[16, 2\], the config asks for \[32\]"),
        (_entry(name, dtype="I32"), f"tensor {name} has type I32, expected f32"),
        (_metadata(group_size="64"), r"tensor embed\.weight\.scale has shape \[40\], the config asks for \[40, 1\]"),
    ):
        damaged = json.loads(json.dumps(header))
        change(damaged)
        assemble(int8, damaged, data)
        with pytest.raises(FormatError, match=message):
            open_model_file(int8)


def test_nan_in_a_norm_is_refused_and_in_a_matrix_found_by_verify(plain):
    header, data = parts(plain)
    del header["__metadata__"][TENSOR_CRC32]
    for name in ("final_norm.weight", "core.0.mlp.up.weight"):
        start, _ = header[name]["data_offsets"]
        assemble(plain, header, data[:start] + np.float32(np.nan).tobytes() + data[start + 4 :])
        with pytest.raises(FormatError, match=rf"tensor {name} holds NaN or infinity"):
            open_model_file(plain).verify()


def test_a_flipped_weight_bit_is_found_by_verify(int8):
    blob = bytearray(int8.read_bytes())
    header, data = parts(int8)
    start, _ = header["core.0.mlp.up.weight"]["data_offsets"]
    blob[len(blob) - len(data) + start + 5] ^= 1
    int8.write_bytes(blob)
    with open_model_file(int8) as file, pytest.raises(FormatError, match=r"tensor core\.0\.mlp\.up\.weight is damaged"):
        file.verify()


def test_a_changed_header_is_found_by_its_checksum(plain):
    header, data = parts(plain)
    _metadata(chat_template="{{ messages}}")(header)
    assemble(plain, header, data, keep_checksum=True)
    with pytest.raises(FormatError, match="the header is damaged"):
        open_model_file(plain)


def test_unknown_metadata_and_white_space_are_harmless(plain):
    header, data = parts(plain)
    del header["__metadata__"][HEADER_CRC32]
    header["__metadata__"]["note"] = "made elsewhere"
    text = json.dumps(header, indent=1)
    with open_model_file(plain) as before:
        want = {name: before.tensor(name).to_float32().copy() for name in header if name != "__metadata__"}
    assemble(plain, (text + " " * (-len(text) % 8)).encode(), data)
    with open_model_file(plain) as file:
        file.verify()
        assert all(np.array_equal(file.tensor(name).to_float32(), values) for name, values in want.items())


def test_an_unreadable_tokenizer_is_a_format_error(plain):
    header, data = parts(plain)
    for text in ("{}", "[]", '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["b c"]}}'):
        _metadata(tokenizer=text)(header)
        assemble(plain, header, data)
        with open_model_file(plain) as file, pytest.raises(FormatError, match="tokenizer cannot be read"):
            file.load_tokenizer()
        with tl.Model(plain, 64, device="cpu") as model, pytest.raises(tl.FormatError, match="tokenizer cannot be read") as caught:
            _ = model.tokenizer
        assert str(caught.value).startswith(str(plain))


# -- fuzz


class Samples(tuple):
    """(path to write to, files); hypothesis prints it in few characters."""

    def __repr__(self):
        return "Samples"


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    folder = tmp_path_factory.mktemp("samples")
    blobs = []
    for i, (config, dtype) in enumerate([(PLAIN, "bf16"), (LOOPED, "int8")]):
        save_model(folder / "m", config, random_tensors(config, i), TOKENIZER, chat_template="{{ x }}", stop_ids=[2], dtype=dtype)
        blobs.append((folder / "m").read_bytes())
    return Samples((folder / "fuzzed", blobs))


def _facts(path):
    with open_model_file(path) as file:
        weights = [(w.name, w.dtype, w.shape, w.group_size) for w in file]
        facts = (file.config, file.tokenizer_json, file.chat_template, file.stop_ids, weights)
        file.load_tokenizer()
        try:
            file.verify()
        except FormatError:
            return facts, None
        return facts, [w.data.tobytes() + (b"" if w.scales is None else w.scales.tobytes()) for w in file]


_kinds = st.sampled_from(["flip", "set", "insert", "delete", "cut", "copy"])
_edits = st.lists(st.tuples(_kinds, st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=4)


@settings(max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sample=st.integers(0, 1), edits=_edits, in_header=st.booleans())
def test_fuzzed_files_are_refused_or_mean_the_same(samples, sample, edits, in_header):
    path, blobs = samples
    original = blobs[sample]
    blob = bytearray(original)
    header_end = 8 + int.from_bytes(original[:8], "little")
    for kind, where, value in edits:
        at = int(where * (min(header_end, len(blob)) if in_header else len(blob)))
        if kind == "cut":
            del blob[at:]
        elif kind == "insert":
            blob[at:at] = bytes([value])
        elif kind == "copy":
            blob[at:at] = blob[at : at + value]
        elif at < len(blob):
            if kind == "delete":
                del blob[at]
            else:
                blob[at] = value if kind == "set" else blob[at] ^ (1 << value % 8)
    path.write_bytes(original)
    facts, data = _facts(path)
    path.write_bytes(blob)
    tracemalloc.start()
    try:
        now, now_data = _facts(path)
    except FormatError as error:
        assert "\n" not in str(error) and len(str(error)) < 1000
    else:
        assert now == facts and now_data in (data, None)
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 30 * len(original)


_junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5), lambda x: st.lists(x) | st.dictionaries(st.text(), x), max_leaves=5
)


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sample=st.integers(0, 1), data=st.data())
def test_fuzzed_headers_without_checksum_never_fail_otherwise(samples, sample, data):
    path, blobs = samples
    path.write_bytes(blobs[sample])
    header, body = parts(path)
    header["__metadata__"].pop(HEADER_CRC32)
    config = json.loads(header["__metadata__"]["config"])
    where = data.draw(st.sampled_from(["config", "header", "__metadata__", "embed.weight", "core.0.attn.q.weight"]))
    target = {"config": config, "header": header}.get(where) or header[where]
    target[data.draw(st.sampled_from(list(target)) | st.text(max_size=3))] = data.draw(_junk)
    if target is config:
        header["__metadata__"]["config"] = json.dumps(config)
    assemble(path, header, body)
    try:
        _facts(path)
    except FormatError as error:
        assert "\n" not in str(error)
