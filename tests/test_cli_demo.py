"""The command line at work: demo and generate."""

import os
import re
import subprocess
import sys

import pytest
from runtime import model_file

import tinyloop_py as tl
from tinyloop_py import cli

FAST = ["--max-tokens", "6", "--loops", "2"]


def test_demo_answers_every_tenant_through_the_pool(capsys):
    assert cli.main(["demo", *FAST]) == 0
    out = capsys.readouterr().out
    requests = re.findall(
        r"\[(\d+) of (\d+) prompt tokens from the pool; first token after [\d.]+ ms, without the pool [\d.]+ ms; [\d,]+ tokens/s\]", out
    )
    assert len(requests) == 8
    assert all(40 < int(matched) < int(total) for matched, total in requests)
    hits, queries = map(int, re.search(r"(\d+) hits in (\d+) queries", out).groups())
    assert hits == queries > 8
    assert "Every answer was the same with and without it" in out


def test_demo_notices_an_answer_that_the_pool_changed(monkeypatch, capsys):
    from tinyloop_py.commands import demo

    class Broken(demo.Show):
        def answer(self, prompt, pool, loops=None):
            tokens, matched, rate = super().answer(prompt, pool, loops)
            return [*tokens[:-1], tokens[-1] ^ 1], matched, rate

    monkeypatch.setattr(demo, "Show", Broken)
    assert cli.main(["demo", *FAST]) == 1
    assert "the pool changed the answer" in capsys.readouterr().err


def test_demo_of_a_model_without_tokenizer_says_so(capsys):
    assert cli.main(["demo", "--model", str(model_file("loop_bare"))]) == 1
    assert "has no tokenizer" in capsys.readouterr().err


def test_generate_prints_the_text_that_the_model_draws(capsys):
    prompt = "Once upon a time, in a small village"
    assert cli.main(["generate", "demo", prompt, "-n", "12", "--loops", "2", "--temperature", "0"]) == 0
    shown = capsys.readouterr()
    with tl.Model(tl.demo_model(), 256) as model:
        ids = model.tokenizer.encode(prompt).ids
        tokens = model.generate(ids, 12, 2, temperature=0.0)
        assert shown.out.rstrip("\n") == model.tokenizer.decode(tokens[len(ids) :])
    assert re.search(rf"{len(ids)} \+ {len(tokens) - len(ids)} tokens, first after [\d.]+ ms", shown.err)


def test_generate_takes_and_prints_ids(capsys):
    assert cli.main(["generate", str(model_file("loop_bare")), "5, 6 7", "--ids", "-n", "4", "--seed", "1"]) == 0
    shown = [int(word) for word in capsys.readouterr().out.split()]
    with tl.Model(model_file("loop_bare"), 64) as model:
        assert shown == model.generate([5, 6, 7], 4, seed=1)[3:]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-n", "0"], "--max-tokens is 0, expected 1 or more"),
        (["--loops", "99"], "--loops is 99, expected 1 to "),
        (["--loops", "0"], "--loops is 0, expected 1 to "),
        (["--max-seq-len", "10"], "--max-seq-len is 10, the longest request takes "),
    ],
)
def test_demo_refuses_in_one_line_before_any_work(args, message, capsys):
    assert cli.main(["demo", *args]) == 1
    shown = capsys.readouterr()
    assert shown.out == "" and message in shown.err and shown.err.count("\n") == 1


def test_demo_of_one_token_shows_no_rate(capsys):
    assert cli.main(["demo", "-n", "1", "--loops", "1"]) == 0
    out = capsys.readouterr().out
    assert "tokens/s" not in out and "48 hits in 48 queries (8 answers, each started 5 times more to time it)" in out


def test_a_prompt_may_follow_the_options(capsys):
    fast = ["-n", "3", "--loops", "1", "--seed", "1"]
    outputs = []
    for argv in (["demo", "Once upon", *fast], ["demo", *fast, "Once upon"], [*fast, "demo", "Once upon"], ["demo", *fast, "--", "Once upon"]):
        assert cli.main(["generate", *argv]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0].strip() and set(outputs) == {outputs[0]}
    assert cli.main(["generate", "demo", "--ids", "1 2 3", *fast]) == 0
    assert len(capsys.readouterr().out.split()) == 3
    for argv in (["demo", *fast, "a", "b"], ["demo", "a", *fast, "b"], ["demo", *fast, "--nothing"]):
        assert cli.main(["generate", *argv]) == 2
        assert "unrecognized arguments" in capsys.readouterr().err


@pytest.mark.parametrize("where", ["argument", "standard input"])
@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_text_that_is_not_utf8_is_refused_in_one_line(where, locale):
    command = [sys.executable, "-m", "tinyloop_py.cli", "generate", "demo", "-n", "1"]
    bad = b"Once \xff upon"
    env = {**os.environ, "LC_ALL": locale}
    command += [bad] if where == "argument" else []
    run = subprocess.run(command, input=bad if where != "argument" else b"", capture_output=True, check=False, env=env)
    assert run.returncode == 1 and b"is not valid UTF-8" in run.stderr and run.stderr.count(b"\n") == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["demo", ""], "the prompt is empty"),
        (["demo", "x", "--ids"], "--ids: 'x' is no token id"),
        (["demo", "4096", "--ids"], "prompt[0] is 4096, expected a token id from 0 to 4095"),
        (["demo", "a", "--loops", "33"], "33"),
        (["demo", "a", "-n", "9999"], "max_seq_len"),
        (["nowhere.tinyloop", "a"], "nowhere.tinyloop"),
    ],
)
def test_generate_refuses_in_one_line(args, message, capsys):
    assert cli.main(["generate", *args]) == 1
    shown = capsys.readouterr()
    assert shown.out == "" and message in shown.err and shown.err.count("\n") == 1


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("command", ["generate demo hi -n 3", "info demo", "demo -n 3"])
def test_a_standard_stream_that_is_closed_is_no_error(command, closed):
    run = subprocess.run(f"exec {sys.executable} -m tinyloop_py.cli {command} {closed}", shell=True, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "Traceback" not in run.stderr


def test_without_standard_input_the_prompt_is_empty():
    run = subprocess.run(f"exec {sys.executable} -m tinyloop_py.cli generate demo <&-", shell=True, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (1, "tinyloop: error: the prompt is empty; give at least one word\n")


def test_generate_reads_its_prompt_from_a_pipe():
    command = [sys.executable, "-m", "tinyloop_py.cli", "generate", "demo", "-n", "3", "--loops", "1"]
    run = subprocess.run(command, input="Once upon a time", capture_output=True, text=True, check=False, env=os.environ)
    assert run.returncode == 0 and run.stdout.strip()
