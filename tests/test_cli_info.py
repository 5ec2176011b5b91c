"""The command line: info, convert, and how errors are shown."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from samples import LOOPED, PLAIN, build, random_tensors
from tokenizers import Tokenizer, models

import tinyloop_py as tl
from tinyloop_py import cli
from tinyloop_py.commands.info import file_facts, kv_nbytes_per_token
from tinyloop_py.config import ModelConfig
from tinyloop_py.layout import matrix_shapes
from tinyloop_py.model_file import open_model_file
from tinyloop_py.model_writer import save_model

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@pytest.fixture
def looped(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "<|end|>": 1}, unk_token="<unk>"))
    save_model(tmp_path / "m.tinyloop", LOOPED, random_tensors(LOOPED), tokenizer, chat_template="x", stop_ids=[1, 30], dtype="int8", group_size=64)
    return tmp_path / "m.tinyloop"


def test_kv_bytes_by_depth():
    """Ouro 1.4B: 96 slots of 2 * 16 heads * 128 at two bytes are 768 KiB."""
    ouro = ModelConfig(vocab_size=49152, dim=2048, ffn_dim=5632, n_heads=16, n_kv_heads=16, head_dim=128, n_core=24, default_loops=4)
    assert kv_nbytes_per_token(ouro, 4) == 768 * 1024 and kv_nbytes_per_token(ouro, 1) == 192 * 1024
    assert kv_nbytes_per_token(LOOPED, 3) == 2 * (1 + 3 * 2 + 1) * 8 * 2


def test_info_as_json(looped, capsys):
    assert cli.main(["info", str(looped), "--json", "--verify"]) == 0
    facts = json.loads(capsys.readouterr().out)
    tensors = random_tensors(LOOPED)
    matrices = set(matrix_shapes(LOOPED))
    assert facts["file_nbytes"] == looped.stat().st_size and facts["config"]["n_core"] == 2 and facts["group_size"] == 64
    assert facts["parameters"]["total"] == sum(x.size for x in tensors.values()) == sum(entry["parameters"] for entry in facts["weights"].values())
    assert facts["parameters"]["core"] == sum(x.size for name, x in tensors.items() if name.startswith("core."))
    assert facts["weights"]["int8"]["tensors"] == len(matrices) and facts["weights"]["f32"]["tensors"] == len(tensors) - len(matrices)
    scales = sum(x.shape[0] * -(-x.shape[1] // 64) for name, x in tensors.items() if name in matrices)
    assert facts["weights"]["int8"]["nbytes"] == sum(tensors[name].size for name in matrices) + 4 * scales
    assert list(facts["kv_fp16_nbytes_per_token"]) == ["1", "2", "4", "8", "16"]
    assert facts["kv_fp16_nbytes_per_token"]["4"] == 2 * 10 * 8 * 2
    by_mode = facts["kv_nbytes_per_token_by_mode"]
    assert by_mode["fp16"] == facts["kv_fp16_nbytes_per_token"][str(LOOPED.default_loops)]
    assert by_mode["fp32"] == 2 * by_mode["fp16"] and by_mode["int8"] < by_mode["fp16"] and by_mode["int4"] < by_mode["int8"]
    assert ("h" in by_mode) == (2 * LOOPED.kv_dim > LOOPED.dim)
    assert facts["tokenizer_vocab"] == 2 and facts["chat_template"] is True and facts["stop_ids"] == {"1": "<|end|>", "30": None}


def test_info_as_text(looped, capsys):
    assert cli.main(["info", str(looped)]) == 0
    out = capsys.readouterr().out
    for text in (
        "1 prelude, 2 core, 1 coda",
        "default 4, trained 4, at most 16",
        "a scale for 64 columns",
        "stops at 1 <|end|>, 30",
        "320  320 B (default)",
    ):
        assert text in out
    assert "checksum" not in out
    assert cli.main(["info", str(looped), "--verify"]) == 0
    assert "every checksum right" in capsys.readouterr().out


def test_depths_hold_the_default_and_the_greatest(tmp_path):
    config = replace(PLAIN, default_loops=5, max_loops=12)
    save_model(tmp_path / "m.tinyloop", config, random_tensors(config))
    with open_model_file(tmp_path / "m.tinyloop") as file:
        assert list(file_facts(file)["kv_fp16_nbytes_per_token"]) == ["1", "2", "4", "5", "8", "12"]


def test_errors_are_one_line_on_stderr_and_exit_1(looped, tmp_path, capsys):
    blob = bytearray(looped.read_bytes())
    blob[-1] ^= 1
    looped.write_bytes(blob)
    for argv, message in (
        (["info", str(tmp_path / "absent")], "No such file or directory"),
        (["info", str(tmp_path)], "a folder, expected a .tinyloop file"),
        (["info", str(looped), "--verify"], "is damaged: its checksum is not"),
        (["convert", str(tmp_path / "absent"), "x.tinyloop"], "absent does not exist"),
        (["convert", str(tmp_path), "x.tinyloop"], "config.json"),
        (["convert", str(looped), "x.tinyloop"], "neither a Hugging Face folder nor a GGUF file"),
    ):
        assert cli.main(argv) == 1
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("tinyloop: error: ") and err.count("\n") == 1 and message in err


def test_wrong_usage_exits_2_and_help_0(capsys):
    for argv in ([], ["frob"], ["info"], ["convert", "a"], ["convert", "a", "b", "--dtype", "q4"], ["convert", "a", "b", "--group-size", "x"]):
        assert cli.main(argv) == 2
    assert cli.main(["--help"]) == 0 and cli.main(["convert", "--help"]) == 0
    assert "convert" in capsys.readouterr().out


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"tinyloop {tl.__version__}\n"


def test_info_knows_the_demo_model(capsys):
    assert cli.main(["info", "demo", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["path"] == str(tl.demo_model())


def test_interrupt_exits_130(looped, monkeypatch, capsys):
    def interrupt(path):
        raise KeyboardInterrupt

    monkeypatch.setattr("tinyloop_py.commands.info.open_model_file", interrupt)
    assert cli.main(["info", str(looped)]) == 130
    assert capsys.readouterr().err == "tinyloop: interrupted\n"


def run_cli(*argv: str, code: str = "from tinyloop_py.cli import main; import sys; sys.exit(main())", **kwargs) -> subprocess.CompletedProcess:
    env = os.environ | {"PYTHONPATH": os.pathsep.join([ROOT, os.environ.get("PYTHONPATH", "")])}
    return subprocess.run([sys.executable, "-c", code, *argv], env=env, capture_output=True, text=True, check=False, **kwargs)


def test_a_reader_that_goes_away_is_no_error(looped):
    command = f'"{sys.executable}" -c "import sys; from tinyloop_py.cli import main; sys.exit(main())" info "{looped}" --json | head -1'
    env = os.environ | {"PYTHONPATH": os.pathsep.join([ROOT, os.environ.get("PYTHONPATH", "")])}
    run = subprocess.run(command, shell=True, env=env, capture_output=True, text=True, check=False)
    assert run.stdout == "{\n" and "Traceback" not in run.stderr


BLOCKED = """
import sys
for name in {blocked!r}:
    sys.modules[name] = None
from tinyloop_py.cli import main
sys.exit(main())
"""


def test_without_the_extras_info_works_and_the_others_name_what_to_install(looped, tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + (3).to_bytes(4, "little") + bytes(16))
    code = BLOCKED.format(blocked=["gguf", "rich", "ml_dtypes", "torch", "transformers"])
    assert run_cli("info", str(looped), code=code).returncode == 0
    run = run_cli("convert", str(tmp_path / "m.gguf"), str(tmp_path / "x.tinyloop"), code=code)
    assert run.returncode == 1 and run.stderr == "tinyloop: error: this needs the package gguf: pip install gguf\n"
    run = run_cli("serve", str(looped), code=BLOCKED.format(blocked=["fastapi"]))
    assert run.returncode == 1 and run.stderr == "tinyloop: error: tinyloop serve needs fastapi: pip install '.[serve]' in a clone of tinyloop\n"


def test_convert_and_its_report(tmp_path):
    build(tmp_path / "src")
    argv = [
        "convert",
        str(tmp_path / "src"),
        str(tmp_path / "m.tinyloop"),
        "--no-tokenizer",
        "--dtype",
        "int8",
        "--group-size",
        "64",
        "--max-loops",
        "4",
    ]
    run = run_cli(*argv, code=BLOCKED.format(blocked=["gguf", "rich", "torch", "safetensors"]))
    assert run.returncode == 0 and run.stderr == "" and "int8, max_loops 4" in run.stdout
    with open_model_file(tmp_path / "m.tinyloop") as file:
        assert file.config.max_loops == 4 and file.group_size == 64 and np.isfinite(file.tensor("embed.weight").to_float32()).all()
