# SPDX-License-Identifier: Apache-2.0
"""Promises of the command line: each subcommand works, an error is one line and status 2, a closed pipe is no error."""

import json
import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from ringattn_core import errors, ring_attention
from ringattn_core.contract.features import Feature
from ringattn_tools.main import main
from ringattn_tools.output import Title, show

CALL = ["explain", "--query", "1,64,4,8", "--ring", "4"]


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(arguments)
    return status, *capsys.readouterr()


def line_of(text: str, start: str) -> str:
    (found,) = [line for line in text.splitlines() if line.split()[:1] == [start]]
    return found


def test_list_says_of_each_backend_where_it_is_from_and_whether_it_can_run(add, capsys) -> None:
    add("good", priority=7)
    add("lame", platforms=("tpu",), probe="lame_block:unsound")
    add("sick", source="import of_nobody")
    status, out, _ = said(capsys, "list")
    assert status == 0
    for part in ("made-good 2.5", "cpu", "7", f"{len(Feature) - 1} of {len(Feature)}", "available"):
        assert part in line_of(out, "good")
    assert line_of(out, "lame:").endswith("no such device in the house")
    good, lame, sick = json.loads(said(capsys, "list", "--json")[1])
    assert (good["distribution"], good["version"], good["priority"], good["available"]) == ("made-good", "2.5", 7, True)
    assert not lame["broken"] and sick["broken"] and "of_nobody" in sick["reason"]


def test_brackets_and_colons_are_printed_as_they_are(capsys) -> None:
    for words in ("pip install 'jax[cuda13]'", "a [bold]b[/bold] :smile: 3"):
        show(words, Title(words), {words: ""}, [{words: "x"}])
        assert capsys.readouterr().out.splitlines() == [*[words] * 4, "x"]


def test_list_loads_no_kernel(add, capsys) -> None:
    add("good")
    assert said(capsys, "list")[0] == 0
    assert "good_block" not in sys.modules
    assert said(capsys, "info", "good")[0] == 0
    assert "good_block" in sys.modules, "this test would not see a kernel that is loaded"


def test_info_of_a_backend_that_cannot_run_says_why_and_exits_with_1(add, capsys) -> None:
    add("lame", probe="lame_block:unsound", door="ring", kernel="RING")
    for json_too in ((), ("--json",)):
        status, out, _ = said(capsys, "info", "lame", *json_too)
        assert status == 1 and "no such device in the house" in out and "lame_block:RING" in out


def test_an_unknown_backend_is_refused_in_one_line_that_has_the_nearest_name(add, capsys) -> None:
    add("good")
    for command in (["info", "goof"], [*CALL, "--backend", "goof"]):
        status, out, err = said(capsys, *command)
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert err.startswith(f"ringattn {command[0]}: no ring-attention backend 'goof' (did you mean 'good'?)")


@pytest.mark.parametrize(
    ("arguments", "tokens", "heads", "options"),
    [
        (["--layout", "spiral"], 64, (4, 4), {"layout": "spiral"}),
        (["--query", "1,60,4,8", "--layout", "zigzag"], 60, (4, 4), {"layout": "zigzag"}),
        (["--kv", "64,3"], 64, (4, 3), {}),
        (["--query", "1,64,6,8", "--strategy", "ulysses"], 64, (6, 6), {"strategy": "ulysses"}),
    ],
)
def test_a_call_that_the_library_refuses_is_refused_in_its_words(arguments, tokens, heads, options, capsys) -> None:
    query, key = (jnp.zeros((1, tokens, count, 8), jnp.bfloat16) for count in heads)
    with pytest.raises(errors.RingAttnError) as refused:
        ring_attention(query, key, key, **options, mesh=Mesh(np.array(jax.devices()[:4]), ("ring",)), axis_name="ring")
    assert said(capsys, *CALL, *arguments) == (2, "", f"ringattn explain: {refused.value}\n")


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["--ring", "0"], "--ring: got 0"),
        (["--mask-builder", "exits:f"], "mask_builder: called with (64, 64, 4, 0, 1) it raised SystemExit: 3"),
        (["--mask-builder", "json:nothing"], "--mask-builder: cannot load 'json:nothing'"),
        (["--restart-positions"], "--restart-positions: is given without documents"),
        (["--query", f"1,{2**20},4,8", "--tile", "4,4"], f"--tile: 4,4 makes {2**36} tiles"),
        (["--query", f"{2**20},{2**20},4,{2**20}"], "query: 1048576x1048576x4x1048576 has more than 2^48 elements"),
        (["--svg", os.sep.join(("", "proc", "nowhere", "x.svg"))], "--svg: cannot write"),
    ],
)
def test_mistakes_of_the_command_line_alone_are_one_line(arguments, fault, capsys, tmp_path, monkeypatch) -> None:
    (tmp_path / "exits.py").write_text("def f(*_): raise SystemExit(3)")
    monkeypatch.syspath_prepend(tmp_path)
    status, out, err = said(capsys, *CALL, *arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"ringattn explain: {fault}")


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["--query", "1,2"], "argument --query: got 2 numbers"),
        (["--query", "1,-2,3,4"], "argument --query: got -2"),
        (["--backend", "xla,"], "argument --backend: got 'xla,'"),
        (["--window", "1,2,3"], "argument --sliding-window/--window: got '1,2,3'"),
        (["--rate", "nan,1"], "argument --rate: got"),
        (["--link", "1@x"], "argument --link: got"),
    ],
)
def test_an_argument_that_cannot_be_read_is_named(arguments, fault, capsys) -> None:
    with pytest.raises(SystemExit) as left:
        main([*CALL, *arguments])
    err = capsys.readouterr().err
    assert left.value.code == 2 and err.count("\n") == 1 and err.startswith(f"ringattn explain: {fault}")


def test_several_backends_are_tried_in_order_and_only_the_answer_is_printed(add, capsys) -> None:
    add("good")
    status, out, err = said(capsys, *CALL, "--backend", "triton, good")
    assert (status, err) == (0, "") and line_of(out, "->").split()[1] == "good"
    status, out, err = said(capsys, *CALL, "--backend", "absent,gone")
    assert (status, err) == (1, "") and "none: no ring-attention backend can run this call on 'cpu': absent:" in out


def shell(code: str, **options: Any) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, **options)


@pytest.mark.parametrize("arguments", [["--help"], ["expalin"]])
def test_help_and_mistakes_are_answered_without_loading_jax(arguments: list[str]) -> None:
    code = f"""
import sys
from ringattn_tools.main import main
try:
    main({arguments!r})
finally:
    print([name for name in ("jax", "numpy") if name in sys.modules])
"""
    assert shell(code).stdout.splitlines()[-1] == "[]"
    assert shell(code.replace("finally:", "finally:\n    import numpy")).stdout.splitlines()[-1] == "['numpy']"


def test_a_closed_pipe_is_no_error() -> None:
    command = [sys.executable, "-m", "ringattn_tools", *CALL]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert run.stdout and run.stderr
    run.stdout.close()
    complaint = run.stderr.read()
    assert (run.wait(60), complaint) == (141, "")
